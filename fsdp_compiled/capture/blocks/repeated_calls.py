"""Dynamo walks through the first two of a list of equal blocks; what it wrote of the second is written again.

    model(x)                Dynamo                     graph

    x = layers[0](x)        walks                      placeholders, calls
    x = layers[1](x)        walks, and is watched      the same, of layers.1      walked_blocks
    x = layers[2](x)        does not walk              the same, of layers.2      written_blocks
    ...

Dynamo's guards are the exact statement of what its walk through a block took for granted. A walk through another block
writes the same calls if all of these hold there, with one block in the place of the other; if its arguments are tensors
that lie alike, and the same numbers; under the same modes; while nothing that was there before the trace is changed.
Where any of it cannot be said, the block is walked through. What is written is what the walk would have written: an
input for each of the block's own tensors, calls with values worked out on fake tensors, the modules and lines they came
from, and the guards, of this block, which are asked again at each step. When Dynamo has built these, their texts are
compared with the walked block's.

Reaches into Dynamo, of torch 2.13 and such as are like it; `RepeatError`, and any other failure in here, is answered by
tracing again without (`dynamo.capture`).
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
from fsdp_compiled.capture.blocks.written_blocks import RepeatError, write
from fsdp_compiled.torch_private.dynamo import Guard, UnspecializedNNModuleVariable, config

log = logging.getLogger("fsdp_compiled")
LOCK = threading.RLock()  # Dynamo, too, traces for one thread at a time


class Repeats:
    """The equal blocks of a model, while Dynamo traces it."""

    def __init__(self, model: nn.Module) -> None:
        self.wrote = False  # whether a block was written that was not walked through
        self.failed = False  # whether a block was begun and not ended
        self._lists: dict[int, tuple[int, type]] = {}  # by block, which of many of one class it is among
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
        self.written: list[tuple[WalkedBlock, BlockCall]] = []  # in the newest trace
        self._told: set[str] = set()
        self._until_traced = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls of equal blocks that Dynamo comes to on this thread pass through here."""
        with LOCK, self._patched(), contextlib.ExitStack() as self._until_traced:
            yield

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        kind, thread = UnspecializedNNModuleVariable, threading.get_ident()
        before = kind.call_function

        def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            walk = functools.partial(before, variable, tx, args, kwargs)
            if threading.get_ident() != thread or id(variable.value) not in self._lists:
                return walk()
            return self._call(walk, variable, tx, args, kwargs)

        kind.call_function = call_function  # type: ignore[method-assign]
        try:
            yield
        finally:
            kind.call_function = before  # type: ignore[method-assign]

    def _call(self, walk: Callable[[], Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if tx.output is not self._output:
            self._output, self._visited, self._walked, self.written = tx.output, set(), {}, []
        mine = self._lists[id(variable.value)]
        if mine not in self._visited:  # it alone reads first what all of them read
            self._visited.add(mine)
            return walk()
        before: Before | None = None
        with self._answered(variable):
            call = BlockCall(variable, tx, args, kwargs)
            if (walked := self._walked.get(mine)) is not None:
                values = walked.check(call)
                if not self.written:
                    # What differentiates later would look for a way through values that were not computed.
                    self._until_traced.enter_context(config.patch(trace_autograd_ops=False))
                result = write(walked, call, values)
                self.written.append((walked, call))
                self.wrote = True
                return result
            before = Before(call)
        result = walk()
        if before is not None:
            with self._answered(variable):
                self._walked[mine] = WalkedBlock(call, before, result)
        return result

    @contextlib.contextmanager
    def _answered(self, variable: Any) -> Iterator[None]:
        """Says why a block is walked through; what else is raised inside means that all of them are to be."""
        self.failed = True
        try:
            yield
        except Unlike as why:
            if str(why) not in self._told:
                self._told.add(str(why))
                log.info("%s is traced by itself, as equal blocks are not: %s", call_path(variable), why)
        self.failed = False

    def check_guards(self, guards: Iterable[Guard]) -> None:
        """Raises `RepeatError` unless what is kept of the guards says of each written block what it says of its like.

        ``guards``: those that are kept, which Dynamo has built.
        """
        texts: dict[str, set[str]] = {}
        for guard in guards:
            texts.setdefault(guard.originating_source.name, set()).update(guard.code_list or ())
        for walked, call in self.written:
            try:
                walked.check_guards(call, texts)
            except Unlike as why:
                raise RepeatError(str(why)) from why
