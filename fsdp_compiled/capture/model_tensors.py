"""The model holds the tensors of the trace while Dynamo walks through its code, and then its own again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_compiled.capture.aot import CaptureError, unwritable
from fsdp_compiled.ir.program import Port

# What a live parameter of `runtime.parameters` has written on it, beside the user's notes.
OURS = frozenset({"_sharded", "_sharded_name", "_sharded_buffer", "_sharded_place", "_is_param"})


def notes_on(parameter: torch.Tensor) -> dict[str, Any]:
    """What the user wrote on it."""
    return {name: value for name, value in vars(parameter).items() if name not in OURS}


class Place(NamedTuple):
    """Where one of the model's parameters or buffers stands."""

    name: str
    table: dict[str, Any]  # of its module
    key: str


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Where they stand, whatever the model's own method says: `checkpoint_wrapper`'s leaves itself out of names."""
    return nn.Module.named_parameters(model, remove_duplicate=remove_duplicate)


def places_of(model: nn.Module) -> Iterator[Place]:
    """Those of all parameters and buffers; a module that is in several places has them once."""
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for key in table:
                yield Place(inside + key, table, key)


@contextlib.contextmanager
def in_place(places: Sequence[Place], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the model holds these tensors, so that Dynamo finds them where the model's code does.

    The traced function does not put them there, as `functional_call` would: Dynamo walks through every line of that for
    every parameter, which took longer than all that models compute.
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
    """Raises `CaptureError` for a parameter that forward replaced. Buffers that it did are what they were again."""
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
