"""Tensors that a program closes over: where each is read at a call, and which others it takes in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from fsdp_compiled.capture.closed_numbers import Numbers


class Closed:
    """The tensors that a program closes over, read as they are now.

    A tensor that has taken another's place (``weights = weights * 2``, a teacher's new parameter) becomes the program's
    input if it is laid out as the other was and shares memory with the same; else the program is not for it.
    ``numbers``: what it relies on of those whose value was read as a Python number.
    """

    numbers = Numbers()

    def __init__(self, closed: Mapping[str, tuple[torch.Tensor, Any]], scope: Mapping[str, Any]) -> None:
        self.tensors = {name: tensor for name, (tensor, _) in closed.items()}
        self._layouts = {name: _layout(tensor) for name, tensor in self.tensors.items()}
        self._shared = _shared(list(self.tensors.values()))
        text = "".join(f"{_name(source)}, " for _, source in closed.values())
        self._read: Callable[[], tuple[Any, ...]] = eval(f"lambda: ({text})", dict(scope)) if closed else tuple

    def moved(self) -> Mapping[str, torch.Tensor] | None:
        """Those that are other tensors now, by name; None where the program is not for them."""
        try:
            now = self._read()
        except Exception:  # one of the places is gone
            return None
        if not self.numbers.hold():
            return None
        if all(map(is_, now, self.tensors.values())):
            return {}
        return None if self._odd(now) else {
            name: new for new, (name, old) in zip(now, self.tensors.items(), strict=True) if new is not old
        }  # fmt: skip

    def odd(self) -> tuple[str, str] | None:
        """The first that the program is not for, as Dynamo names it, and what the program relies on of it."""
        try:
            name = self._odd(self._read())
        except Exception as error:
            name = f"a tensor that is read from outside ({type(error).__name__})"
        if name is not None:
            return name, f"the shape, dtype, strides and sharing of {name}, which are others now"
        if (asked := self.numbers.broken()) is not None:
            return asked, f"the number in {asked}, which is another now"
        return None

    def _odd(self, now: Sequence[Any]) -> str | None:
        names = list(self.tensors)
        found = [name for name, new in zip(names, now, strict=True) if _layout(new) != self._layouts[name]]
        found += [name for name, one, two in zip(names, _shared(now), self._shared, strict=True) if one != two]
        return found[0] if found else None

    def replace(self, moved: Mapping[str, torch.Tensor]) -> None:
        """These are the tensors from now on."""
        self.tensors.update(moved)


def _name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name


def _layout(tensor: Any) -> tuple[Any, ...]:
    """What a program depends on of a tensor, but for its values."""
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


def _storage(tensor: Any) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, AttributeError, NotImplementedError):
        return id(tensor)
