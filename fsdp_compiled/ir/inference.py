"""Infers the fake tensors that a call gives: once for calls that are alike, however many layers have one.

    view(full_0, [8, 8])    ->  float32[8, 8], by running it on fake tensors
    view(full_1, [8, 8])    ->  the same, without: its operator, arguments and layouts are those of the first

Results are tensors of their own; what an operator writes in place and returns is the argument itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsdp_compiled.ir.nodes import fake_tensor

PLAIN = frozenset(
    [int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class _Odd(Exception):
    """Something whose calls are not compared: a size that moves, an object."""


class Alike:
    """Tells calls of nodes apart: by operator, numbers, and the layouts of tensors."""

    def __init__(self) -> None:
        self._known_layouts: dict[Hashable, int] = {}  # each with a number, since to hash one takes long
        self._layouts: dict[int, tuple[torch.Tensor, int]] = {}  # of arguments, by identity

    def key(self, node: fx.Node) -> Hashable | None:
        """Equal for nodes that do the same and give the same, on other values; None where that is not known."""
        try:
            return node.target, self._key((node.args, node.kwargs, node.meta["val"]), [])
        except _Odd:
            return None

    def _key(self, values: Sequence[Any], tensors: list[torch.Tensor]) -> tuple[Hashable, ...]:
        """Equal for arguments that are alike: the same numbers, tensors of one layout, the same one in the same places.

        ``tensors`` is filled with the tensors, each once.
        """
        found: list[Any] = []
        self._spell(values, found, tensors, {})
        return tuple(found)

    def _spell(
        self, values: Iterable[Any], found: list[Any], tensors: list[torch.Tensor], places: dict[int, int]
    ) -> None:
        """Each value by its kind, and by what follows for that kind: so no two rows of values are spelled alike."""
        for value in values:
            if (kind := type(value)) is fx.Node:
                value = value.meta["val"]
                kind = type(value)
            if kind is FakeTensor:
                known = self._layouts.get(id(value))
                place = places.setdefault(id(value), len(tensors))
                if place == len(tensors):
                    tensors.append(value)
                found += (kind, place, known[1] if known is not None else self._number(value))
            elif kind in PLAIN:
                found += (kind, value)
            elif isinstance(value, tuple | list):
                found += (kind, len(value))
                self._spell(value, found, tensors, places)
            elif isinstance(value, dict):
                found += (kind, len(value), *value)
                self._spell(value.values(), found, tensors, places)
            else:
                raise _Odd

    def number(self, value: Any) -> int | None:
        """The same for tensors of one layout; None for what is no such tensor."""
        if (known := self._layouts.get(id(value))) is not None:
            return known[1]
        with suppress(_Odd):
            return self._number(value)
        return None

    def _number(self, value: torch.Tensor) -> int:
        if not _plain(value):
            raise _Odd
        number = self._known_layouts.setdefault(_layout_of(value), len(self._known_layouts))
        self._layouts[id(value)] = value, number
        return number


class Inference(Alike):
    """Works out calls for one graph, and remembers them."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def __call__(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of ``target(*args, **kwargs)``, of nodes or of fake tensors themselves."""
        if target is getitem:  # of as many as there are, each of which takes one out
            return getitem(*_values(args))
        tensors: list[torch.Tensor] = []
        try:
            key = (id(target), *self._key((args, kwargs), tensors))
        except _Odd:
            return propagate(self._mode, target, _values(args), _values(kwargs))
        if (known := self._known.get(key)) is not None:
            return self._made(known[1], tensors)
        value = propagate(self._mode, target, _values(args), _values(kwargs))
        with suppress(_Odd):
            places = {id(tensor): place for place, tensor in enumerate(tensors)}
            self._known[key] = target, self._described(value, places)  # which keeps the operator, and so its identity
        return value

    def _described(self, value: Any, places: Mapping[int, int]) -> Any:
        """How to make the result again: the places of arguments that it is, and the layouts of other tensors."""
        if type(value) in (tuple, list):
            return type(value)(self._described(one, places) for one in value)
        if value is None:
            return None
        if (place := places.get(id(value))) is not None:
            return place
        return _Result(_layout_of(value), self._number(value))

    def _made(self, described: Any, tensors: Sequence[torch.Tensor]) -> Any:
        kind = type(described)
        if kind is _Result:
            made = fake_tensor(self._mode, *described.layout)
            self._layouts[id(made)] = made, described.number
            return made
        if isinstance(described, tuple | list):
            return kind([self._made(one, tensors) for one in described])
        return None if described is None else tensors[described]


@dataclass(frozen=True)
class _Result:
    """A tensor of its own."""

    layout: Layout
    number: int


def _values(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: node.meta["val"])


def propagate(mode: FakeTensorMode, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def _layout_of(value: torch.Tensor) -> Layout:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _plain(value: Any) -> bool:
    """Whether it is a fake tensor that its shape, strides, dtype and device say all of."""
    return (
        type(value) is FakeTensor
        and value.layout == torch.strided
        and not (value.requires_grad or value.is_conj() or value.is_neg())
        and all(type(size) is int for size in (*value.shape, *value.stride()))
    )
