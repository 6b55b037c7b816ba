"""What stands in a model for a parameter whose values live in shards.

It tells the truth about what it is (shape, strides, dtype, device, whether it is trained) and holds no values. Whatever
would read or write values is refused at once, by name: every operator (``__torch_dispatch__``, below autograd and
autocast), and the doors of a tensor that no operator guards (``data``, ``grad``, ``numpy``, hooks, copies).

It is a wrapper subclass without storage, as DTensor is, and takes the place of the user's own parameter by
`torch.utils.swap_tensors`: every list, optimizer or module that holds the old object holds this one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.plan.plan import Leaf, contiguous_stride
from fsdp_compiled.runtime.autograd_hooks import ON_PARAMETER

READ = (
    "Run the model with sharded(*inputs) or sharded.step(*batch). Read all values with sharded.full_state_dict(), or "
    "this rank's part in sharded.state.parameters[{key!r}]."
)
WRITE = "Write before compile_sharded, or write this rank's part, sharded.state.parameters[{key!r}], in place."
GRADIENT = (
    "Gradients are inside the program: sharded.value_and_grad(*batch) returns them, Policy(clip=...) clips their norm, "
    "sharded.grad_norm is the norm."
)
COPY = "Build the model again and load sharded.full_state_dict() into it; to keep the weights, save that."
CONVERT = "Convert the model before compile_sharded; Policy(precision=...) says in what dtype it computes."
FREEZE = (
    "Shards and optimizer state are laid out by it. Load sharded.full_state_dict() into a new model, set requires_grad "
    "there, and call compile_sharded on that."
)
# Operators that users know by another name, with the cure where it is a special one.
OPERATORS = {"_to_copy": (".to()", CONVERT), "_local_scalar_dense": (".item()", READ), "detach": ("detach", COPY)}
# Code that looks for a gradient to drop it or to convert it: that there is none is all that it needs to know.
NO_GRADIENT = {inspect.unwrap(f).__code__ for f in (nn.Module.zero_grad, nn.Module._apply, Optimizer.zero_grad)}


def _refusing(what: str, cure: str) -> Callable[..., NoReturn]:
    """A method that refuses."""

    def method(self: ShardedParameter, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self.refusal(what, cure)

    return method


class ShardedParameter(nn.Parameter):
    """A parameter without values; it knows its name in the model, and the buffer whose shards hold its values."""

    _sharded_name: str
    _sharded_buffer: str

    def __new__(cls, leaf: Leaf, device: torch.device, key: str, notes: Mapping[str, Any]) -> ShardedParameter:
        stride = contiguous_stride(leaf.whole_shape) if leaf.split else leaf.stride
        self = torch.Tensor._make_wrapper_subclass(
            cls, leaf.whole_shape, stride, dtype=leaf.dtype, device=device, requires_grad=leaf.trainable
        )
        self.__dict__.update(notes, _sharded_name=leaf.names[0], _sharded_buffer=key)
        return self

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> NoReturn:
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        writes = [
            named.get(argument.name)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written = _among(writes)
        name = func.overloadpacket.__name__
        what, cure = OPERATORS.get(name, (name, WRITE if written else READ))
        raise (written or _among(named))[0].refusal(what, cure)

    def refusal(self, what: str, cure: str) -> RuntimeError:
        return RuntimeError(
            f"{self._sharded_name} was taken over by compile_sharded: its values live in shards, and `{what}` finds "
            f"none here. {cure.format(key=self._sharded_buffer)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad":
            self.requires_grad_(value)
        elif name == "data":
            if value is not self:  # as `model.to(...)` says it where nothing has to be converted
                raise self.refusal(".data = ...", WRITE)
        elif name == "grad":
            if value is not None:
                raise self.refusal(".grad = ...", GRADIENT)
        else:
            super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        if bool(requires_grad) != self.requires_grad:
            was = "trainable" if self.requires_grad else "frozen"
            raise RuntimeError(
                f"requires_grad of {self._sharded_name}, which was {was}, cannot be changed after compile_sharded. "
                f"{FREEZE}"
            )
        return self

    @property
    def data(self) -> NoReturn:
        raise self.refusal(".data", READ)

    @property
    def grad(self) -> None:
        if sys._getframe(1).f_code not in NO_GRADIENT:
            raise self.refusal(".grad", GRADIENT)

    register_hook = _refusing("register_hook", ON_PARAMETER)
    register_post_accumulate_grad_hook = _refusing("register_post_accumulate_grad_hook", ON_PARAMETER)
    numpy = _refusing("numpy", READ)
    tolist = _refusing("tolist", READ)
    data_ptr = _refusing("data_ptr", READ)
    storage = _typed_storage = untyped_storage = _refusing("storage", READ)
    share_memory_ = _refusing("share_memory_", COPY)
    __dlpack__ = _refusing("__dlpack__", READ)
    __deepcopy__ = _refusing("deepcopy", COPY)
    __reduce_ex__ = _refusing("pickle", COPY)

    def __repr__(self, **_kwargs: Any) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"
        frozen = "" if self.requires_grad else ", frozen"
        return (
            f"ShardedParameter({self._sharded_name}: {kind}{frozen}; "
            f"values in sharded.state.parameters[{self._sharded_buffer!r}])"
        )


def replace(parameter: nn.Parameter, leaf: Leaf, device: torch.device, key: str) -> nn.Parameter:
    """Makes this very object one whose values live in shards, so that its memory is freed whoever holds it.

    Returns the object that stands for it: another one where somebody else has weak references to it, as
    `torch.compile` has to the parameters of what it compiled; the old one is then left empty.
    """
    made = ShardedParameter(leaf, device, key, notes=parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, made)
        return parameter
    except (RuntimeError, TypeError):
        with suppress(RuntimeError):
            parameter.data = parameter.data.new_empty(0)
        return made


def _among(value: Any) -> list[ShardedParameter]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, ShardedParameter)]
