"""The model holds the tensors of the trace while Dynamo walks through its code, and then its own tensors again.

A tensor subclass with its own mathematics is traced as the plain tensors inside it:

    weight            Int8Weight[6, 4] of int_data, scale     the model's code computes with this
    weight.int_data   int8[6, 4]                              the traced graph is a function of these two, and they are
    weight.scale      float32[6]                              the program's inputs

`torch.compile` traces the class's own code for each operator, if the class names its inner tensors
(``__tensor_flatten__`` and ``__tensor_unflatten__``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_compiled.capture.aot import CaptureError, unwritable
from fsdp_compiled.ir.program import Port
from fsdp_compiled.plan.leaf import own_mathematics

# The attributes that `runtime.parameters` sets on a live parameter, beside the user's own attributes.
OURS = frozenset({"_sharded", "_sharded_name", "_sharded_buffer", "_sharded_place", "_is_param"})


def notes_on(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user set on the parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in OURS}


class Place(NamedTuple):
    """Where the model holds one of its parameters or buffers."""

    name: str
    table: dict[str, Any]  # of its module
    key: str


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """`nn.Module.named_parameters`, even if the model overrides it: `checkpoint_wrapper` leaves itself out of names."""
    return nn.Module.named_parameters(model, remove_duplicate=remove_duplicate)


def places_of(model: nn.Module) -> Iterator[Place]:
    """The places of all parameters and buffers. A module that the model has under several names counts once."""
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for key in table:
                yield Place(inside + key, table, key)


@contextlib.contextmanager
def in_place(places: Sequence[Place], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the model holds these tensors, so that Dynamo finds them where the model's code does.

    The traced function does not put them there with `functional_call`: Dynamo would walk through every line of that for
    every parameter, which took longer than the trace of the model's own computation.
    """
    model = [place.table[place.key] for place in places]
    for place in places:
        place.table[place.key] = tensors[place.name]
    try:
        yield
    finally:
        for place, tensor in zip(places, model, strict=True):
            place.table[place.key] = tensor


def check_parameters(places: Sequence[Place], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `CaptureError` if forward replaced a parameter. Buffers that it replaced are put back."""
    for place in places:
        if place.table.get(place.key) is not tensors[place.name]:
            if isinstance(tensors[place.name], nn.Parameter):
                raise CaptureError(unwritable(Port("in", "parameter", place.name)))
            place.table[place.key] = tensors[place.name]  # written with ``out=``, which the graph holds


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards, the model holds the parameters and buffers that it held before."""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers) if table]
    before = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, tensors in before:
            table.update(tensors)


def is_wrapped(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return bool(own_mathematics(kind)) and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def check_wrapped(where: str, tensor: torch.Tensor) -> None:
    """Raises `CaptureError` for a tensor subclass with its own mathematics that does not name its inner tensors."""
    if (own := own_mathematics(type(tensor))) and not is_wrapped(tensor):
        raise CaptureError(
            f"{where} is a {type(tensor).__name__}, which has a {own[0]} of its own and no __tensor_flatten__: a "
            "program would compute with an ordinary tensor. Give the class __tensor_flatten__ and "
            "__tensor_unflatten__, which say what it is made of."
        )


def opened(name: str, tensor: torch.Tensor, part: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors inside this tensor, by the keys of their ports; the tensor itself if it is plain."""
    if not is_wrapped(tensor):
        yield f"{name}.{part}" if part else name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from opened(name, getattr(tensor, inner), f"{part}.{inner}" if part else inner)


def wrapped_fake(tensor: torch.Tensor, fake: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of the same class, with fake inner tensors."""
    if not is_wrapped(tensor):
        return fake(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: wrapped_fake(getattr(tensor, name), fake) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return made


def made_of(tensor: torch.Tensor) -> Any:
    """The properties of a tensor that a program relies on: equal for tensors that the same program can be used with."""
    if not is_wrapped(tensor):
        return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    outside = type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return outside, context, [(name, made_of(getattr(tensor, name))) for name in names]
