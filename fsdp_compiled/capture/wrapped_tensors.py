"""Tensors of classes with mathematics of their own, as the plain tensors that they are made of.

    weight            Int8Weight[6, 4] of int_data, scale     what the model's code computes with
    weight.int_data   int8[6, 4]                              what is traced is a function of these, and these are the
    weight.scale      float32[6]                              program's inputs

`torch.compile` traces what such a class makes of each operator, if the class says what it is made of
(``__tensor_flatten__`` and ``__tensor_unflatten__``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.plan.leaf import own_mathematics


def is_wrapped(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return bool(own_mathematics(kind)) and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def check_wrapped(where: str, tensor: torch.Tensor) -> None:
    """Raises `CaptureError` for a class with mathematics of its own that does not say what it is made of."""
    if (own := own_mathematics(type(tensor))) and not is_wrapped(tensor):
        raise CaptureError(
            f"{where} is a {type(tensor).__name__}, which has a {own[0]} of its own and no __tensor_flatten__: a "
            "program would compute with an ordinary tensor. Give the class __tensor_flatten__ and "
            "__tensor_unflatten__, which say what it is made of."
        )


def opened(name: str, tensor: torch.Tensor, part: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that it is made of, by the keys of their ports; itself, where it is plain."""
    if not is_wrapped(tensor):
        yield f"{name}.{part}" if part else name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from opened(name, getattr(tensor, inner), f"{part}.{inner}" if part else inner)


def fake_of(tensor: torch.Tensor, fake: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """One of the same class, of fakes of what it is made of."""
    if not is_wrapped(tensor):
        return fake(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: fake_of(getattr(tensor, name), fake) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return made


def made_of(tensor: torch.Tensor) -> Any:
    """What a program takes for granted of it: equal for tensors that it is good for."""
    if not is_wrapped(tensor):
        return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    outside = type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return outside, context, [(name, made_of(getattr(tensor, name))) for name in names]
