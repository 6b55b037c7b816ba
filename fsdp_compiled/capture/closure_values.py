"""Tensors that a program closes over: where a call reads each one, and which other tensors may take its place. Also
tensors that the trace reached without reading an element: the program may rely on their layout.

Closed-over tensors whose value is read as a Python number: ``if step.item() > 3``, ``table[count]``.

    step = torch.tensor(1), read with item()         what the trace asked of it: step <= 3

Dynamo treats the number as a symbol with a value, and records each condition that the code checked, as it does for
sizes. Every call checks these conditions again, on the values that the tensors have then. If the code only computes
with a number, the program itself reads it. Dynamo does this for integer and double tensors without dims on a CPU. Of
any other tensor the number is a symbol without a value, and the code can check no condition on it.

This is the only file that reads the guards of a `ShapeEnv` on such numbers. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import is_
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Numbers:
    """The conditions that one program relies on. ``scope``: the names in Dynamo's expressions."""

    def __init__(self, env: ShapeEnv | None = None, scope: Mapping[str, Any] | None = None) -> None:
        sources = {} if env is None else env.var_to_sources
        read = {symbol: first for symbol, (first, *_) in sources.items() if first.name.endswith(".item()")}
        self._asked = [] if env is None else [one.expr for one in env.guards if one.expr.free_symbols & read.keys()]
        used = set().union(*(one.free_symbols for one in self._asked)) & read.keys()
        self._names = {symbol: read[symbol].name for symbol in sorted(used, key=str)}
        text = "".join(f"{name}, " for name in self._names.values())
        self._read: Callable[[], tuple[Any, ...]] = eval(f"lambda: ({text})", dict(scope or {})) if used else tuple
        self._held: tuple[Any, ...] = ()  # values for which all holds

    def hold(self) -> bool:
        """Whether every condition that the trace checked has the same answer now."""
        return not self._names or self.broken() is None

    def broken(self) -> str | None:
        """The first number, as Dynamo names it, for which a condition does not hold."""
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


class Closed:
    """The tensors that a program closes over, read as they are now.

    A new tensor may stand where the trace found another (``weights = weights * 2``, a teacher's new parameter). It
    becomes the program's input if it has the same layout and shares memory with the same tensors; otherwise the program
    cannot be used for it. ``numbers``: the conditions on tensors whose value was read as a Python number. ``unread``:
    where the trace found tensors of which it can only have read shape, dtype and strides. ``as_traced``: a context in
    which all names lead where they led in the trace.
    """

    numbers = Numbers()

    def __init__(
        self,
        closed: Mapping[str, tuple[torch.Tensor, Any]],
        scope: Mapping[str, Any],
        unread: Sequence[str],
        as_traced: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._as_traced = as_traced
        self.tensors = {name: tensor for name, (tensor, _) in closed.items()}
        self._layouts = {name: layout_of(tensor) for name, tensor in self.tensors.items()}
        self._shared = _shared(list(self.tensors.values()))
        self._places = list(map(_place, self.tensors.values()))
        self._read = _reading([source.name for _, source in closed.values()], scope)
        both = zip(unread, _reading(unread, scope)(), strict=True)
        # Fake tensors are the model's own, reached by another name (a weak reference); other code watches them.
        self._unread = [name for name, tensor in both if not isinstance(tensor, FakeTensor)]
        self._look = _reading(self._unread, scope)
        self._looked = list(map(layout_of, self._look()))

    def moved(self) -> Mapping[str, torch.Tensor] | None:
        """The tensors that were replaced, by name; None if the program cannot be used with the tensors of now."""
        if not self.tensors and not self._unread:
            return {} if self.numbers.hold() else None
        try:
            with self._as_traced():
                now = self._read()
                same = not self._unread or list(map(layout_of, self._look())) == self._looked
        except Exception:  # one of the places is gone
            return None
        if not same or not self.numbers.hold():
            return None
        places = list(map(_place, now))
        if places == self._places and all(map(is_, now, self.tensors.values())):
            return {}
        if self._odd(now):
            return None
        both = zip(now, places, self.tensors.items(), self._places, strict=True)
        return {name: new for new, place, (name, old), was in both if new is not old or place != was}

    def odd(self) -> tuple[str, str] | None:
        """The first tensor that the program cannot be used with, as Dynamo names it, and what the program relies on."""
        try:
            with self._as_traced():
                now = zip(self._unread, list(map(layout_of, self._look())), self._looked, strict=True)
                name = self._odd(self._read())
            name = name or next((name for name, layout, was in now if layout != was), None)
        except Exception as error:
            name = f"a tensor that is read from outside ({type(error).__name__})"
        if name is not None:
            return name, f"the shape, dtype, strides and sharing of {name}, which are others now"
        if (asked := self.numbers.broken()) is not None:
            return asked, f"the number in {asked}, which is another now"
        return None

    def _odd(self, now: Sequence[Any]) -> str | None:
        names = list(self.tensors)
        found = [name for name, new in zip(names, now, strict=True) if layout_of(new) != self._layouts[name]]
        found += [name for name, one, two in zip(names, _shared(now), self._shared, strict=True) if one != two]
        return found[0] if found else None

    def replace(self, moved: Mapping[str, torch.Tensor]) -> None:
        """Makes these the program's tensors from now on."""
        self.tensors.update(moved)
        self._places = list(map(_place, self.tensors.values()))


def _reading(names: Sequence[str], scope: Mapping[str, Any]) -> Callable[[], tuple[Any, ...]]:
    return eval(f"lambda: ({''.join(f'{name}, ' for name in names)})", dict(scope)) if names else tuple


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """The properties of a tensor that a program depends on, except its values."""
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    return (
        type(tensor), tensor.layout, tensor.shape, tensor.stride() if tensor.layout == torch.strided else None,
        tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _shared(tensors: Sequence[Any]) -> list[int]:
    """For each tensor, the first that shares memory with it."""
    first: dict[int, int] = {}
    return [first.setdefault(_storage(tensor), place) for place, tensor in enumerate(tensors)]


def _place(tensor: Any) -> tuple[Any, ...]:
    """Where the tensor's elements are: ``tensor.data = other`` or ``t_()`` changes this, but not the object."""
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride()
    except (RuntimeError, AttributeError, NotImplementedError):
        return (id(tensor),)


def _storage(tensor: Any) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, AttributeError, NotImplementedError):
        return id(tensor)
