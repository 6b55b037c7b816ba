"""Values that can be compared later with what they were: copies of what may change, and identities of what may not."""

from __future__ import annotations

from typing import Any

import torch

DEPTH = 3  # how far objects inside objects are looked into
FLAT = frozenset((bool, int, float, str, type(None)))


def is_flat(value: Any) -> bool:
    """A dictionary of plain values, which Python compares by itself."""
    return type(value) is dict and all(map(is_plain, value.values()))


def is_plain(value: Any) -> bool:
    return type(value) in FLAT or (type(value) is tuple and all(type(item) in FLAT for item in value))


def may_change(value: Any) -> bool:
    """Whether the value may change and stay the same object."""
    return type(value) not in FLAT and type(value_of(value, DEPTH)) is not Same


def value_of(value: Any, depth: int) -> Any:
    """A value that can be compared; objects are held, so that no other one takes their identity."""
    if type(value) in FLAT:
        return value
    if isinstance(value, torch.Tensor):
        return Same(value), 0 if value.is_inference() else value._version
    if depth and isinstance(value, dict):
        return {key: value_of(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [value_of(item, depth - 1) for item in value]
    own = getattr(value, "__dict__", None)
    if depth and type(own) is dict and own and not isinstance(value, torch.nn.Module) and not callable(value):
        return Same(value), {name: value_of(item, depth - 1) for name, item in own.items()}
    return Same(inside(value))


def inside(value: Any) -> Any:
    """The function itself: Dynamo's first trace puts `torch.compiler.disable` around optimizers' ``_init_group``."""
    while (inner := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
        value = inner
    return value


class Same:
    """Equal to another of the same object, whatever that object says."""

    __slots__ = ("of",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.of is self.of
