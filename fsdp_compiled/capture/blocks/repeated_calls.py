"""Dynamo walks through the first two of a list of equal blocks; its nodes for the second are written again for others.

    model(x)                Dynamo                     graph

    x = layers[0](x)        walks                      placeholders, calls
    x = layers[1](x)        walks, and is watched      the same, of layers.1      walked_blocks
    x = layers[2](x)        does not walk              the same, of layers.2      written_blocks
    ...

Dynamo's guards state exactly what its walk through a block relied on. A walk through another block writes the same
calls if four things hold: all of these guards, with one block in the place of the other; its arguments are the same
numbers, and tensors of the same layout; the modes are the same; and objects from before the trace are unchanged, except
for the same `changes`. If any of this cannot be told, Dynamo walks through the block. Otherwise this package writes
what the walk would have written: an input for each of the block's own tensors, calls with values computed on fake
tensors, the modules and lines they came from, and the block's guards that are kept, which every step checks. When
Dynamo has built these guards, their texts are compared with the walked block's.

This file patches Dynamo of torch 2.11 to 2.14. After a `RepeatError`, or any other failure in here,
`dynamo.trace_whole` traces again without it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from fsdp_compiled.capture.blocks.block_calls import BlockCall, Unlike, call_path
from fsdp_compiled.capture.blocks.equal_blocks import FEWEST
from fsdp_compiled.capture.blocks.walked_blocks import Before, WalkedBlock
from fsdp_compiled.capture.blocks.written_blocks import RepeatError, WrittenBlock
from fsdp_compiled.capture.guards import Recorder, is_own
from fsdp_compiled.capture.object_identity import has_text
from fsdp_compiled.capture.python_answers import Answers
from fsdp_compiled.capture.source_lines import plain_names
from fsdp_compiled.torch_private.dynamo import Guard, Source, config
from fsdp_compiled.torch_private.names import replaced

log = logging.getLogger("fsdp_compiled")
CALL = "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable.call_function"
BUILD = "torch._dynamo.guards.CheckFunctionManager.build_guards"
LOCK = threading.RLock()  # Dynamo, too, traces for one thread at a time


class Repeats:
    """The equal blocks of a model, while Dynamo traces it. ``answers``: what the trace asks of Python."""

    def __init__(self, model: nn.Module, answers: Answers) -> None:
        self._answers = answers
        self.wrote = False  # whether a block was written that was not walked through
        self.failed = False  # whether a block was begun and not ended
        self._lists: dict[int, tuple[int, type]] = {}  # for each block, its list: a parent's children of one class
        for parent in model.modules():
            same: dict[type, dict[int, nn.Module]] = {}
            for child in parent.children():
                same.setdefault(type(child), {})[id(child)] = child
            for kind, children in same.items():
                if len(children) >= FEWEST:
                    self._lists |= dict.fromkeys(children, (id(parent), kind))
        self._output: Any = None  # Dynamo's, of one trace
        self._visited: set[tuple[int, type]] = set()
        self._walked: dict[tuple[int, type], WalkedBlock] = {}
        self.written: list[WrittenBlock] = []  # in the newest trace
        self._tensors: set[int] = set()  # their own tensors, by identity
        self.built: list[tuple[WrittenBlock, int, Guard]] = []  # guards that Dynamo built, with their places (`guard`)
        self._told: set[str] = set()
        self._values: dict[Any, Any] = {}  # from before the trace, at the sources that were looked up
        self._until_traced = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls of equal blocks that Dynamo comes to on this thread pass through here."""
        others = (CALL, self._call), (BUILD, self._build)
        with LOCK, replaced("equal blocks", *others), contextlib.ExitStack() as self._until_traced:
            yield

    def _build(self, build: Callable[..., Any], manager: Any, guards: Any, *rest: Any, **named: Any) -> Any:
        if "guard_filter_fn" in named:  # those that are kept
            guards = [*guards, *self.more(guards)]
        return build(manager, guards, *rest, **named)

    def _call(self, call_function: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        walk = functools.partial(call_function, variable, tx, args, kwargs)
        if id(variable.value) not in self._lists:
            return walk()
        if tx.output is not self._output:
            self._output, self._visited, self._walked = tx.output, set(), {}
            self.written, self._tensors, self.built, self._values = [], set(), [], {}
        mine = self._lists[id(variable.value)]
        if mine not in self._visited:  # only the first block to be called reads shared values for the first time
            self._visited.add(mine)
            return walk()
        before: Before | None = None
        with self._answered(variable):
            call = BlockCall(variable, tx, args, kwargs, self._values)
            if (like := self._walked.get(mine)) is not None:
                return self._write(like, call)
            before = Before(call)
        compared = self._answers.compared
        result = walk()
        if before is not None:
            with self._answered(variable):
                if self._answers.compared > compared:
                    raise Unlike("it compares two objects, and which ones another has nobody would ask")
                inside = [one for one in self.written if one.call.source.name.startswith(call.source.name)]
                guards = [block.guard(place) for block in inside for place in range(len(block.walked.guards))]
                self._walked[mine] = WalkedBlock(call, before, result, guards)
        return result

    def _write(self, like: WalkedBlock, call: BlockCall) -> Any:
        tensors, values = like.check(call, self._tensors)
        if not self.written:
            # A later `torch.autograd.grad` would look for a path through values that were not computed.
            self._until_traced.enter_context(config.patch(trace_autograd_ops=False))
        block = WrittenBlock(like, call, values)
        result = block.write(tensors)
        self.written.append(block)
        self._tensors.update(map(id, tensors))
        self.wrote = True
        return result

    @contextlib.contextmanager
    def _answered(self, variable: Any) -> Iterator[None]:
        """Logs why a block is walked through (`Unlike`). Any other error inside means that all blocks must be."""
        self.failed = True
        try:
            yield
        except Unlike as why:
            if str(why) not in self._told:
                self._told.add(str(why))
                path = plain_names(call_path(variable))
                log.info("%s is traced by itself, as equal blocks are not: %s", path, why)
        self.failed = False

    def more(self, chosen: Iterable[Guard]) -> list[Guard]:
        """The kept guards of blocks that were not walked through. ``chosen``: the kept guards of the others."""
        self.built = []
        kept = set(map(id, chosen))
        places: dict[int, list[int]] = {}  # of guards that are kept, by walked block
        for block in self.written:
            of_like = places.get(id(block.walked))
            if of_like is None:  # all blocks inside of it were written before, and are among those before
                guards = enumerate(guard for guard, _, _ in block.walked.guards)
                of_like = block.walked.distinct(place for place, guard in guards if id(guard) in kept)
                places[id(block.walked)] = of_like
            self.built += [(block, place, block.guard(place)) for place in of_like]
            kept.update(id(block.guard(place)) for place in of_like)  # of a block around this one, too
        return [guard for _, _, guard in self.built]

    def tell(self, recorder: Recorder) -> None:
        """Tells the recorder what the guards of blocks that were not walked through look at."""
        noted: dict[int, tuple[list[tuple[int, str]], list[Source]]] = {}  # of walked blocks; places of plain tensors
        for block in self.written:
            walked = block.walked
            if (mine := noted.get(id(walked))) is None:
                # (The walked block's guards cover the classes, which blocks share, but not keys and texts.)
                kinds = [
                    (place, kind)
                    for place, kind in enumerate(walked.kinds)
                    if kind != "TYPE_MATCH" or isinstance(one := block.values[place], dict) or has_text(one)
                ]
                mine = noted[id(walked)] = kinds, [one for one in walked.sources if not is_own(one.name)]
            recorder.repeat(mine[0], block.values, block.name)
            recorder.meet(walked.there(one, block.call).name for one in mine[1])

    def check_guards(self, guards: Iterable[Guard]) -> None:
        """Raises `RepeatError` unless the guards of each written block have the texts of the walked block's guards.

        ``guards``: the kept guards of the other blocks. Dynamo has built all guards by now.
        """
        texts: dict[str, set[str]] = {}
        for guard in (*guards, *(guard for _, _, guard in self.built)):
            texts.setdefault(guard.originating_source.name, set()).update(guard.code_list or ())
        for block, place, guard in self.built:
            one, other = block.walked.call.source.name, block.call.source.name
            said = {text.replace(one, other) for text in block.walked.guards[place][0].code_list or ()}
            if not said <= texts[guard.originating_source.name]:
                raise RepeatError(f"a guard of {plain_names(other)} is not that of the one before")
