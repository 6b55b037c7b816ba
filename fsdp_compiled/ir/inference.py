"""Infers the fake tensors that a call returns: once for calls that are alike, in however many layers.

    view(full_0, [8, 8])    ->  float32[8, 8], by running it on fake tensors
        view(full_1, [8, 8])    ->  the same, without running it: operator, arguments and layouts are those of the first

Results are new tensors; where an operator writes an argument in place and returns it, the result is that argument.
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
    """An argument for which calls are not compared: a dynamic size or an object."""


class Alike:
    """Compares calls of nodes: by operator, numbers, and the layouts of tensors."""

    def __init__(self) -> None:
        self._known_layouts: dict[Hashable, int] = {}  # a number for each, since hashing one takes long
        self._layouts: dict[int, tuple[torch.Tensor, int]] = {}  # of arguments, by identity

    def key(self, node: fx.Node) -> Hashable | None:
        """Equal for nodes that do the same, on other values, and give like results; None where that is not known."""
        try:
            return node.target, self._key((node.args, node.kwargs, node.meta["val"]), [])
        except _Odd:
            return None

    def _key(self, values: Sequence[Any], tensors: list[torch.Tensor]) -> tuple[Hashable, ...]:
        """Equal for like arguments: the same numbers, layouts of tensors, and places of a repeated tensor.

        ``tensors`` is filled with each tensor once.
        """
        found: list[Any] = []
        self._spell(values, found, tensors, {})
        return tuple(found)

    def _spell(
        self, values: Iterable[Any], found: list[Any], tensors: list[torch.Tensor], places: dict[int, int]
    ) -> None:
        """Writes each value as its kind and its content, so that no two different rows of values are written alike."""
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

    def _number(self, value: torch.Tensor) -> int:
        if not _plain(value):
            raise _Odd
        number = self._known_layouts.setdefault(_layout_of(value), len(self._known_layouts))
        self._layouts[id(value)] = value, number
        return number


class Inference(Alike):
    """Works out calls for the graphs of one fake mode, and remembers them, from pass to pass."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def __call__(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of ``target(*args, **kwargs)``; the arguments are nodes, or fake tensors themselves."""
        if target is getitem:  # not remembered: each call takes another item out
            return getitem(*_values(args))
        tensors: list[torch.Tensor] = []
        try:
            key = (id(target), *self._key((args, kwargs), tensors))
        except _Odd:
            return propagate(self.mode, target, _values(args), _values(kwargs))
        if (known := self._known.get(key)) is not None:
            return self._made(known[1], tensors)
        value = propagate(self.mode, target, _values(args), _values(kwargs))
        with suppress(_Odd):
            places = {id(tensor): place for place, tensor in enumerate(tensors)}
            self._known[key] = target, self._described(value, places)  # which keeps the operator, and so its identity
        return value

    def _described(self, value: Any, places: Mapping[int, int]) -> Any:
        """A recipe for the result: which arguments it contains, by place, and the layouts of its other tensors."""
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
            made = fake_tensor(self.mode, *described.layout)
            self._layouts[id(made)] = made, described.number
            return made
        if isinstance(described, tuple | list):
            return kind([self._made(one, tensors) for one in described])
        return None if described is None else tensors[described]


@dataclass(frozen=True)
class _Result:
    """A result tensor that is none of the arguments."""

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
    """Whether it is a fake tensor that its shape, strides, dtype and device describe completely."""
    return (
        type(value) is FakeTensor
        and value.layout == torch.strided
        and not (value.requires_grad or value.is_conj() or value.is_neg())
        and all(type(size) is int for size in (*value.shape, *value.stride()))
    )
