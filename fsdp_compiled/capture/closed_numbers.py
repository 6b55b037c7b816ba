"""Closed-over tensors whose value is read as a Python number: ``if step.item() > 3``, ``table[count]``.

    step = torch.tensor(1), read with item()         what the trace asked of it: step <= 3

Dynamo takes the number for an unknown that has a value, and notes what the code asked of it as it does for sizes. What
was asked is asked again at every call, of the values that the tensors have then; a number that is only computed with
is read by the program itself. It does so for whole numbers and doubles without dims on a CPU; numbers that are read out
of other tensors are unknowns without a value, of which nothing can be asked.

This is the only file that reads the guards of a `ShapeEnv` on such numbers. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Numbers:
    """What one program relies on; ``scope``: where Dynamo's names of things are looked up."""

    def __init__(self, env: ShapeEnv | None = None, scope: Mapping[str, Any] | None = None) -> None:
        sources = {} if env is None else env.var_to_sources
        read = {symbol: first for symbol, (first, *_) in sources.items() if _name(first).endswith(".item()")}
        self._asked = [] if env is None else [one.expr for one in env.guards if one.expr.free_symbols & read.keys()]
        used = set().union(*(one.free_symbols for one in self._asked)) & read.keys()
        self._names = {symbol: _name(read[symbol]) for symbol in sorted(used, key=str)}
        text = "".join(f"{name}, " for name in self._names.values())
        self._read: Callable[[], tuple[Any, ...]] = eval(f"lambda: ({text})", dict(scope or {})) if used else tuple
        self._held: tuple[Any, ...] = ()  # values for which all holds

    def hold(self) -> bool:
        """Whether all that was asked has the same answer now."""
        return not self._names or self.broken() is None

    def broken(self) -> str | None:
        """The first number, as Dynamo names it, of which something does not hold."""
        try:
            now = self._read()
        except Exception:  # one of the places is gone
            return next(iter(self._names.values()))
        if now == self._held:
            return None
        values = dict(zip(self._names, now, strict=True))
        for one in self._asked:
            if one.subs(values) != True:  # noqa: E712, sympy's own true
                return next(self._names[symbol] for symbol in self._names if symbol in one.free_symbols)
        self._held = now
        return None


def _name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name
