"""What an optimizer's rules depend on besides its param groups: its attributes, its class, and what that defines.

    optimizer.nesterov = False        an attribute
    optimizer.defaults["eps"] = 0     an entry of one
    Mine.update = other               a method of its class, or of a class that this one extends

Rules keep what these were when they were traced, so all are compared at every step, in a microsecond or two. What
functions read elsewhere, such as globals of their module, see `outside`.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fsdp_compiled.optim.comparable import DEPTH, Same, inside, is_flat, may_change, value_of
from fsdp_compiled.optim.twin import attributes_of, step_of


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
                and all(value_of(value, DEPTH) == copy for value, copy in self._deep)
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
        held = [*attributes_of(own).values()]
        held += [value for base in _bases(self._kind) for name, value in base.__dict__.items() if name[:2] != "__"]
        self._flat = [(value, dict(value)) for value in held if is_flat(value)]
        self._deep = [(value, value_of(value, DEPTH)) for value in held if not is_flat(value) and may_change(value)]


def _bases(kind: type) -> list[type]:
    """The class and what it extends, up to PyTorch's ``Optimizer``."""
    return list(kind.__mro__[: kind.__mro__.index(Optimizer)])


def _snapshot(optimizer: Optimizer) -> dict[tuple[str, type | None], Any]:
    """Values that compare equal while nothing that rules depend on was changed, by name and the class that has it."""
    kind = type(optimizer)
    found: dict[tuple[str, type | None], Any] = {
        (name, None): value_of(value, DEPTH) for name, value in attributes_of(optimizer).items()
    }
    for base in _bases(kind):
        for name, value in base.__dict__.items():
            # PyTorch wraps `step` when an instance is made.
            if name[:2] != "__" and name != "step" and not _is_inherited(kind, base, name, value):
                found[f"{base.__qualname__}.{name}", base] = value_of(value, DEPTH)
    return {**found, ("step", kind): step_of(kind), ("__class__", None): kind}


def _is_inherited(kind: type, base: type, name: str, value: Any) -> bool:
    """Whether the class says again what it would have of the next one: Dynamo puts its wrappers on every class."""
    later = kind.__mro__[kind.__mro__.index(base) + 1 :]
    above = next((other.__dict__[name] for other in later if name in other.__dict__), Same)
    return inside(value) is inside(above)
