"""What an optimizer's rules depend on besides its param groups: its attributes, its class, and what that defines.

    optimizer.nesterov = False        an attribute
    optimizer.defaults["eps"] = 0     an entry of one
    Mine.update = other               a method of its class, or of a class that this one extends

Rules keep what these were when they were traced, so all are compared at every step, in a microsecond or two. What
functions read elsewhere, such as globals of their module, is not looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.twin import attributes_of, step_of

DEPTH = 3  # how far objects inside objects are looked into
FLAT = frozenset((bool, int, float, str, type(None)))


class Attributes:
    """An optimizer's attributes and class as they are when this is made."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._then = _snapshot(optimizer)
        self._quickly()

    def unchanged(self) -> bool:
        """Whether a look at the objects themselves finds nothing new; False does not yet mean a change."""
        own = self._optimizer
        try:
            return (
                own.__class__ is self._kind
                and list(own.__dict__.values()) == self._values
                and all(list(base.__dict__.values()) == values for base, values in self._bases)
                and all(value == copy for value, copy in self._flat)
                and all(_value(value, DEPTH) == copy for value, copy in self._deep)
            )
        except Exception:  # values that cannot be compared
            return False

    def changed(self) -> list[str]:
        """The names of what was changed, added or removed."""
        now = _snapshot(self._optimizer)
        names = dict.fromkeys((*self._then, *now))
        found = [n for n in names if n not in self._then or n not in now or self._then[n] != now[n]]
        if not found:
            self._quickly()
        return [name for name, _ in found]

    def _quickly(self) -> None:
        """Prepares what `unchanged` compares."""
        own = self._optimizer
        self._kind = type(own)
        self._values = list(own.__dict__.values())
        self._bases = [(base, list(base.__dict__.values())) for base in _bases(self._kind)]
        inside = [*attributes_of(own).values()]
        inside += [value for base in _bases(self._kind) for name, value in base.__dict__.items() if name[:2] != "__"]
        self._flat = [(value, dict(value)) for value in inside if _is_flat(value)]
        self._deep = [(value, _value(value, DEPTH)) for value in inside if not _is_flat(value) and _may_change(value)]


def _bases(kind: type) -> list[type]:
    """The class and what it extends, up to PyTorch's ``Optimizer``."""
    return list(kind.__mro__[: kind.__mro__.index(Optimizer)])


def _snapshot(optimizer: Optimizer) -> dict[tuple[str, type | None], Any]:
    """Values that compare equal while nothing that rules depend on was changed, by name and the class that has it."""
    kind = type(optimizer)
    found: dict[tuple[str, type | None], Any] = {
        (name, None): _value(value, DEPTH) for name, value in attributes_of(optimizer).items()
    }
    for base in _bases(kind):
        for name, value in base.__dict__.items():
            # PyTorch wraps `step` when an instance is made.
            if name[:2] != "__" and name != "step" and not _is_inherited(kind, base, name, value):
                found[f"{base.__qualname__}.{name}", base] = _value(value, DEPTH)
    return {**found, ("step", kind): step_of(kind), ("__class__", None): kind}


def _is_inherited(kind: type, base: type, name: str, value: Any) -> bool:
    """Whether the class says again what it would have of the next one: Dynamo puts its wrappers on every class."""
    later = kind.__mro__[kind.__mro__.index(base) + 1 :]
    above = next((other.__dict__[name] for other in later if name in other.__dict__), _Same)
    return _inside(value) is _inside(above)


def _is_flat(value: Any) -> bool:
    """A dictionary of plain values, which Python compares by itself."""
    return type(value) is dict and all(map(_is_plain, value.values()))


def _is_plain(value: Any) -> bool:
    return type(value) in FLAT or (type(value) is tuple and all(type(item) in FLAT for item in value))


def _may_change(value: Any) -> bool:
    """Whether the value may change and stay the same object."""
    return type(value) not in FLAT and type(_value(value, DEPTH)) is not _Same


def _value(value: Any, depth: int) -> Any:
    """A value that can be compared; objects are held, so that no other one takes their identity."""
    if type(value) in FLAT:
        return value
    if isinstance(value, torch.Tensor):
        return _Same(value), 0 if value.is_inference() else value._version
    if depth and isinstance(value, dict):
        return {key: _value(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_value(item, depth - 1) for item in value]
    own = getattr(value, "__dict__", None)
    if depth and type(own) is dict and own and not isinstance(value, torch.nn.Module) and not callable(value):
        return _Same(value), {name: _value(item, depth - 1) for name, item in own.items()}
    return _Same(_inside(value))


def _inside(value: Any) -> Any:
    """The function itself: Dynamo's first trace puts `torch.compiler.disable` around optimizers' ``_init_group``."""
    while (inner := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
        value = inner
    return value


class _Same:
    """Equal to another of the same object, whatever that object says."""

    __slots__ = ("of",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and other.of is self.of
