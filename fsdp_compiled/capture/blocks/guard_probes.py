"""Checks whether the guards of a walked block would hold for another block, on the objects that the guards look at."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_compiled.capture.blocks.block_calls import BLOCK, BlockCall, Unlike, moved, plain
from fsdp_compiled.capture.closure_values import layout_of
from fsdp_compiled.capture.looked_up_names import looks_elsewhere
from fsdp_compiled.capture.source_lines import plain_names
from fsdp_compiled.torch_private.dynamo import ChainedSource, Guard, LocalSource, Source

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
HOOKS_OF = itemgetter(*HOOKS)
HOLDERS = ("_modules", "_parameters", "_buffers")


def alike(one: Any, other: Any) -> bool:
    """Whether a guard gives the same answer for both objects."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module):
        return True  # what is read of it has guards of its own
    if looks_elsewhere(type(one)):  # the object itself says where
        return False
    if isinstance(one, torch.Tensor):
        return layout_of(one) == layout_of(other)
    if plain(one) and plain(other):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        if [(type(key), repr(key)) for key in one] != [(type(key), repr(key)) for key in other]:
            return False
        # Code may read any value of a dictionary of plain values; in other dictionaries, the values read have guards.
        return not all(map(plain, one.values())) or list(map(repr, one.values())) == list(map(repr, other.values()))
    if type(one) is functools.partial:
        said = [(part.func, vars(part), part.args, tuple(part.keywords.items())) for part in (one, other)]
        return said[0][:2] == said[1][:2] and all(map(plain, said[0][2:])) and repr(said[0][2:]) == repr(said[1][2:])
    return isinstance(one, tuple | list) and len(one) == len(other) and all(map(alike, one, other))


def structure_of(module: nn.Module) -> list[Any]:
    """The classes of a block's modules, and the names of what they hold. Raises `Unlike` if one has hooks."""
    held = vars(module)
    if any(HOOKS_OF(held)) or "forward" in held:
        raise Unlike("it has hooks")
    found: list[Any] = [type(module), module.training, list(held)]
    for kind in HOLDERS:
        found.append([(key, one is None) for key, one in held[kind].items()] if held[kind] else None)
    for inner in held["_modules"].values():
        if inner is not None:
            found += structure_of(inner)
    return found


TABLES = ("__dict__", "_modules", "_parameters", "_buffers")  # tables of a module, which are plain dictionaries
# A guard, the object that it looks at, and other sources that it names.
Looked = tuple[Guard, Any, tuple[Source, ...]]


class Question(NamedTuple):
    """For the guard at ``place`` in the list: the object that it looks at, a function that tells of this and another
    object whether that passes, the names that the guard looks up in it, and which of these exist."""

    place: int
    value: Any
    same: Callable[[Any, Any], bool]
    names: list[str]
    has: list[bool]


class Questions:
    """What the guards of a walked block ask of another block. ``call``: the call of the walked block."""

    def __init__(
        self, call: BlockCall, guards: Sequence[Looked], kinds: Sequence[str], sources: Sequence[Source]
    ) -> None:
        """``kinds``: the kinds of the guards; ``sources``: where the block's own tensors are."""
        self._call, self._guards, self._sources = call, guards, sources
        self._asked = list(self._questions(kinds))
        self._read, self._tables = self._reader(), self._read_in()

    def ask(self, call: BlockCall) -> tuple[list[Any], list[torch.Tensor]]:
        """The objects that the guards look at in another block, and its own tensors. Raises `Unlike` if one differs."""
        if call.evaluate(self._tables):
            raise Unlike("it has a dictionary that makes what is looked up")
        there, elsewhere, tensors = self._read(call)
        for place, value, same, names, has in self._asked:
            mine, its = there[place], elsewhere[place]
            if mine is value and not its:
                continue
            if not (same(value, mine) and (not names or has == _has(mine, names))):
                name = self._guards[place][0].originating_source.name.removeprefix(self._call.source.name)
                raise Unlike(f"{plain_names(name).strip('.')} is not what it is in the one before")
            if any(mine is not one for one in its):
                raise Unlike("what is one object in one is two in the other")
        return there, tensors

    def _questions(self, kinds: Sequence[str]) -> Iterator[Question]:
        """The questions of the guards; of guards that ask the same, only the first one's."""
        known = set()
        for place, (guard, value, others) in enumerate(self._guards):
            names = _names(guard)
            itself = kinds[place] == "ID_MATCH"
            question = guard.name, itself, *names
            if others or question not in known:
                known.add(question)
                yield Question(place, value, is_ if itself else alike, names, _has(value, names))

    def _is_own(self, source: Source) -> bool:
        return moved(source, self._call.source, LocalSource(BLOCK), {}) is not source

    def _read_in(self) -> types.CodeType:
        """Code that tells whether another block has a dictionary that would make what `_read` looks up in it
        (``__missing__``). The outermost dictionary comes first."""
        found: dict[str, Source] = {}
        for source in (*(guard.originating_source for guard, _, _ in self._guards), *self._sources):
            while isinstance(source, ChainedSource) and self._is_own(source.base):
                source = source.base
                if not source.name.endswith(TABLES) and source.name not in found:
                    found[source.name] = source
        tables = [source for source in found.values() if isinstance(self._call.value(source), dict)]
        texts = (moved(one, self._call.source, LocalSource(BLOCK), {}).name for one in tables)
        makes = " or ".join(f"hasattr(type({text}), '__missing__')" for text in sorted(texts, key=len))
        return compile(makes or "False", "<tables>", "eval")

    def _reader(self) -> Callable[[BlockCall], tuple[list[Any], list[list[Any]], list[Any]]]:
        """A function that reads from another call, all at once: the object that each guard looks at, those at the other
        sources that it names, and the tensors."""
        moved_to: dict[int, Source] = {}

        def text(source: Source) -> str:
            return moved(source, self._call.source, LocalSource(BLOCK), moved_to).name

        def row(texts: Iterable[str]) -> str:
            return f"[{', '.join(texts)}]"

        texts = [text(guard.originating_source) for guard, _, _ in self._guards]
        places = {one: place for place, one in enumerate(dict.fromkeys(texts))}
        others = row(row(map(text, others)) for _, _, others in self._guards)
        code = compile(f"({row(places)}, {others}, {row(map(text, self._sources))})", "<guards>", "eval")
        order = [places[one] for one in texts]

        def read(call: BlockCall) -> tuple[list[Any], list[list[Any]], list[Any]]:
            values, elsewhere, tensors = call.evaluate(code)
            return [values[place] for place in order], elsewhere, tensors

        return read


def _names(guard: Guard) -> list[str]:
    """The attributes or keys whose presence a guard checks."""
    create = guard.create_fn
    given = create.keywords.values() if isinstance(create, functools.partial) else ()
    return [one for one in given if isinstance(one, str)]


def _has(value: Any, names: Sequence[str]) -> list[bool]:
    return [hasattr(value, name) or (isinstance(value, dict) and name in value) for name in names]
