"""A model's parameters after compile_sharded: live views of what the next step reads.

    ddp, one rank    WholeParameter     an ordinary parameter, over its place in the flat buffer
    else             ShardedParameter   a DTensor whose local part is a stretch of this rank's flat shard

Both take the place of the user's own parameter by `torch.utils.swap_tensors`: every list, optimizer or module that
holds the old object holds this one. Values can be read and written in place. Anything that would put other memory
there, or call hooks that no program calls, raises an error that names it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fsdp_compiled.runtime.autograd_hooks import ON_PARAMETER
from fsdp_compiled.runtime.parameters.shard_layout import ShardPlace
from fsdp_compiled.runtime.parameters.sharded_tensor import READ, WRITE, ShardedTensor, Values, refusing, sharded

SWAP = "Call torch.__future__.set_swap_module_params_on_conversion(False) first: then values are copied into it."
# What gives a tensor another shape, or other memory.
RESHAPING = (
    "set_", "resize_", "resize_as_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_",
    "as_strided_",
)  # fmt: skip
CONVERT = "Convert the model before compile_sharded; Policy(precision=...) says in what dtype it computes."


class _Parameter:
    """What both kinds of parameter refuse. ``_sharded_name``: its name in the model; ``_sharded_buffer``: its
    buffer."""

    _sharded_name: str
    _sharded_place: ShardPlace

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad":
            self.requires_grad_(value)
        elif name == "data":
            if value is not self:  # `model.to(...)` does so if nothing has to be converted
                moved = (value.dtype, value.device) != (self.dtype, self.device)  # type: ignore[attr-defined]
                refusing(".data = ...", CONVERT if moved else WRITE)(self)
        elif name == "grad":
            self._sharded_place.layout.gradients_left |= value is not None
            super().__setattr__(name, value)
        else:
            super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """For calls of the model itself. A step raises an error if it is not what the shards were laid out for."""
        if bool(requires_grad) != self.requires_grad:  # type: ignore[attr-defined]
            self._sharded_place.layout.flips += 1
            super().requires_grad_(requires_grad)  # type: ignore[misc]
        return self

    register_hook = refusing("register_hook", ON_PARAMETER)
    register_post_accumulate_grad_hook = refusing("register_post_accumulate_grad_hook", ON_PARAMETER)
    module_load = refusing("load_state_dict with swap_tensors", SWAP)


for _name in RESHAPING:
    setattr(_Parameter, _name, refusing(_name, f"{WRITE} Register parametrizations before compile_sharded."))


class ShardedParameter(_Parameter, ShardedTensor):
    """A live parameter of which each rank has a stretch."""


class WholeParameter(_Parameter, nn.Parameter):
    """A live parameter of which each rank has all: a view of its buffer. It has a DTensor's reading methods."""

    def full_tensor(self, **_: Any) -> torch.Tensor:
        return self.detach().clone()

    def to_local(self, **_: Any) -> torch.Tensor:
        return self.detach()

    @property
    def data(self) -> torch.Tensor:
        """Unlike ``data`` of other tensors, it counts writes, so that copies in the compute dtype follow them."""
        return self.detach()

    def __repr__(self, **_: Any) -> str:
        return f"Parameter containing:\n{self.detach()!r}"

    share_memory_ = refusing("share_memory_", READ)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            made = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)


def replace(parameter: nn.Parameter, place: ShardPlace) -> nn.Parameter:
    """Makes this very object a view of the place, so that its own memory is freed even if others hold the object.

    Returns the object that stands for it. This is another one if somebody else has weak references to it, as
    `torch.compile` has to the parameters of what it compiled. The old one is then left empty.
    """
    notes = {"_sharded_name": place.name, "_sharded_buffer": place.buffer.key, "_sharded_place": place}
    shard = place.layout.shards[place.buffer.key]
    made: Any
    if place.layout.whole:
        made = nn.Parameter.__new__(WholeParameter, place.leaf.at(shard, place.part.offset), parameter.requires_grad)
        found = _swapped(parameter, made, notes)
        _register(found, place)
        return found
    made = sharded(Values(place), place.like(shard.dtype), shard.device, ShardedParameter)
    values = made.__dict__.pop("_sharded")
    found = _swapped(parameter, made, notes)
    found.__dict__.update(_sharded=values, _is_param=True)
    _register(found, place)
    torch.Tensor.requires_grad_(found, place.leaf.trainable)
    return found


def _register(parameter: nn.Parameter, place: ShardPlace) -> None:
    """Keeps a weak reference, so `swap_tensors` refuses it from now on, and notices gradients that are added to it."""
    layout = place.layout
    layout.references[place.name] = weakref.ref(parameter)
    if parameter.is_floating_point():
        wanted = parameter.requires_grad
        torch.Tensor.requires_grad_(parameter)  # a hook requires it
        torch.Tensor.register_post_accumulate_grad_hook(parameter, layout.noticed)
        torch.Tensor.requires_grad_(parameter, wanted)


def _swapped(parameter: nn.Parameter, made: Any, notes: Mapping[str, Any]) -> nn.Parameter:
    """Swaps ``made`` into the user's own object, with the attributes that the user set there, and ``notes``."""
    made.__dict__.update(parameter.__dict__, **notes)
    try:
        torch.utils.swap_tensors(parameter, made)
        return parameter
    except (RuntimeError, TypeError):
        with suppress(RuntimeError):
            parameter.data = parameter.data.new_empty(0)
        return made


def show(parameters: Iterable[nn.Parameter]) -> None:
    """Makes whole parameters views of the present shards, after the state was given other tensors."""
    for parameter in parameters:
        if isinstance(parameter, WholeParameter):
            place = parameter._sharded_place
            view = WholeParameter(place.leaf.in_shape(place.live), parameter.requires_grad)
            view.__dict__.update(parameter.__dict__)
            place.layout.references.pop(place.name)
            torch.utils.swap_tensors(parameter, view)
            _register(parameter, place)


def is_live(tensor: Any) -> bool:
    """Whether this is a parameter that shows what a step reads."""
    return type(tensor) in (WholeParameter, ShardedParameter)
