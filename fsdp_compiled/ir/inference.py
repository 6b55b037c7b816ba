"""What a call gives, worked out on fake tensors: once for calls that are alike, however many layers have one.

    view(full_0, [8, 8])    ->  float32[8, 8], by running it on fake tensors
    view(full_1, [8, 8])    ->  the same, without: its operator, arguments and layouts are those of the first

Results are tensors of their own; what an operator writes in place and returns is the argument itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsdp_compiled.ir.nodes import fake_tensor

PLAIN = frozenset(
    [int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)


class _Odd(Exception):
    """Something whose calls are not compared: a size that moves, an object."""


class Alike:
    """Tells calls of nodes apart: by operator, numbers, and the layouts of tensors."""

    def __init__(self) -> None:
        self._layouts: dict[int, tuple[torch.Tensor, Hashable]] = {}  # of arguments, by identity

    def key(self, node: fx.Node) -> Hashable | None:
        """Equal for nodes that do the same and give the same, on other values; None where that is not known."""
        tensors: list[torch.Tensor] = []
        try:
            return node.target, self._key((node.args, node.kwargs, node.meta["val"]), tensors, {})
        except _Odd:
            return None

    def _key(self, value: Any, tensors: list[torch.Tensor], places: dict[int, int]) -> Hashable:
        """Equal for arguments that are alike: the same numbers, tensors of one layout, the same one in the same places.

        ``tensors`` is filled with the tensors, each once.
        """
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if isinstance(value, tuple | list):
            return (kind, *[self._key(one, tensors, places) for one in value])
        if isinstance(value, dict):
            return (kind, *[(name, self._key(one, tensors, places)) for name, one in value.items()])
        if (known := self._layouts.get(id(value))) is None:
            if not _plain(value):
                raise _Odd
            known = self._layouts[id(value)] = value, (tuple(value.shape), value.stride(), value.dtype, value.device)
        place = places.setdefault(id(value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        return place, known[1]


class Inference(Alike):
    """Works out calls for one graph, and remembers them."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._known: dict[Hashable, Any] = {}

    def __call__(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of ``target(*args, **kwargs)``, of nodes or of fake tensors themselves."""
        if target is getitem:  # of as many as there are, each of which takes one out
            return getitem(*_values(args))
        tensors: list[torch.Tensor] = []
        places: dict[int, int] = {}  # in that list, by identity
        try:
            key = (target, self._key(args, tensors, places), self._key(kwargs, tensors, places) if kwargs else None)
        except _Odd:
            return propagate(self._mode, target, _values(args), _values(kwargs))
        if key in self._known:
            return self._made(self._known[key], tensors)
        value = propagate(self._mode, target, _values(args), _values(kwargs))
        with suppress(_Odd):
            self._known[key] = _described(value, places)
        return value

    def _made(self, described: Any, tensors: Sequence[torch.Tensor]) -> Any:
        if isinstance(described, tuple | list):
            return type(described)(self._made(one, tensors) for one in described)
        if isinstance(described, int):
            return tensors[described]
        if described is None:
            return None
        made = described.made(self._mode)
        self._layouts[id(made)] = made, described.given
        return made


class _Layout:
    """Of a result."""

    def __init__(self, value: torch.Tensor) -> None:
        self.given = tuple(value.shape), value.stride(), value.dtype, value.device

    def made(self, mode: FakeTensorMode) -> torch.Tensor:
        return fake_tensor(mode, *self.given)


def _values(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: node.meta["val"])


def propagate(mode: FakeTensorMode, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def _described(value: Any, places: Mapping[int, int]) -> Any:
    """How to make the result again: the places of arguments that it is, and the layouts of other tensors."""
    if type(value) in (tuple, list):
        return type(value)(_described(one, places) for one in value)
    if id(value) in places:
        return places[id(value)]
    if value is None:
        return None
    if not _plain(value):
        raise _Odd
    return _Layout(value)


def _plain(value: Any) -> bool:
    """Whether it is a fake tensor that its shape, strides, dtype and device say all of."""
    return (
        type(value) is FakeTensor
        and value.layout == torch.strided
        and not (value.requires_grad or value.is_conj() or value.is_neg())
        and all(type(size) is int for size in (*value.shape, *value.stride()))
    )
