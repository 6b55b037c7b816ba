"""One parameter, as a plan sees it before it has a place: names, shape, layout in memory, optimizer group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

# The methods of a class that computes as `torch.Tensor` does.
ORDINARY = (
    vars(torch.Tensor)["__torch_function__"], vars(nn.Parameter)["__torch_function__"],
    vars(torch.Tensor)["__torch_dispatch__"],
)  # fmt: skip

# The methods of FSDP2's extension protocol: what is sent of a parameter, and what is made of it.
PROTOCOL = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def check_modules(model: nn.Module) -> None:
    """Raises ``ValueError`` for a TorchScript module, whose parameters cannot be replaced."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'The model'} is TorchScript ({module.original_name}), which cannot be read. Pass the "
                "original module."
            )


def check_parameter(where: str, parameter: torch.Tensor, call: str) -> None:
    """Raises ``ValueError`` for a parameter that has no shape yet or is complex, or whose gradients should have another
    dtype than the parameter. ``call``: the function that was called."""
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{where} has no shape yet: call the model once on an example batch, then {call}.")
    if parameter.is_complex():
        raise ValueError(f"{where} is complex; store it as real numbers (torch.view_as_real), which can be sharded.")
    wanted = getattr(parameter, "grad_dtype", None)
    if wanted not in (None, parameter.dtype):
        raise ValueError(
            f"{where} is {str(parameter.dtype)[6:]} and has grad_dtype {str(wanted)[6:]}; expected its own dtype. Make "
            "it float32, and compute in half precision: MixedPrecisionPolicy(param_dtype=torch.bfloat16), "
            "in Policy(precision=...) or fully_shard(mp_policy=...)."
        )


def check_class(where: str, tensor: torch.Tensor, parameter: bool = True) -> None:
    """Raises ``ValueError`` for a tensor whose class computes in its own way, or decides what is sent of it: a program
    would treat it as an ordinary tensor. Quantized weights have such classes (torchao, bitsandbytes)."""
    kind = type(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    if own := own_mathematics(kind):
        cure = ""
        if parameter and all(hasattr(kind, name) for name in PROTOCOL):
            cure = "Shard this model with fsdp_compiled.fully_shard, which calls what the class has for FSDP2; or make "
        elif parameter:
            cure = f"Give the class {' and '.join(PROTOCOL)}, as FSDP2 asks for, and call fully_shard; or make "
        raise ValueError(
            f"{where} is a {kind.__name__}, which has a {own[0]} of its own; expected an ordinary tensor: it would be "
            f"computed with as if it were one. {cure or 'Make '}it an ordinary one (for torchao: do not call quantize_ "
            "before this)."
        )


def own_mathematics(kind: type) -> tuple[str, ...]:
    """The functions of a tensor's class that make it compute, or be sent, in another way than an ordinary tensor."""
    if kind in (torch.Tensor, nn.Parameter, DTensor) or kind.__module__.startswith("fsdp_compiled."):
        return ()
    own = [name for name in PROTOCOL if hasattr(kind, name)]
    for name in ("__torch_function__", "__torch_dispatch__"):
        base = next(base for base in kind.__mro__ if name in vars(base))
        if vars(base)[name] not in ORDINARY:
            own.append(name)
    return tuple(own)


@dataclass(frozen=True)
class TensorParallel:
    """How a DTensor parameter lies along the tp axis: ``dim`` is cut into ``parts``; None: each rank has the whole.

    The cut is that of ``torch.chunk``: where ``parts`` do not divide the dim, the last parts are smaller, or empty. In
    a rank's buffers every part takes the room of the first one, with zeros at its end.
    """

    dim: int | None
    shape: tuple[int, ...]  # of the whole parameter
    parts: int = 1

    @property
    def uneven(self) -> bool:
        return self.dim is not None and self.shape[self.dim] % self.parts != 0

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the first part, which is also what each rank lays into its buffers."""
        return tuple(-(-size // self.parts) if dim == self.dim else size for dim, size in enumerate(self.shape))

    def own(self, index: int) -> int:
        """The size of the dim on the rank at this place."""
        assert self.dim is not None
        each = self.part_shape[self.dim]
        return min(max(self.shape[self.dim] - index * each, 0), each)

    def __str__(self) -> str:
        return "whole" if self.dim is None else f"dim {self.dim} of {list(self.shape)} cut"


@dataclass(frozen=True)
class Leaf:
    """What the plan needs to know of one parameter; tied parameters are one leaf with several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    group: int | None  # optimizer group; None: no optimizer updates it
    block: str
    tp: TensorParallel | None = None  # shape and stride are of the first part; None: a plain tensor, which is whole
    owned: bool = False  # one rank along the shard axis updates the whole of it (`owners`)
    shard_dim: int = 0  # the dim that ranks along the shard axis divide, where the layout is by rows (`rows`)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def split(self) -> bool:
        """Whether each rank along the tp axis has a part of it."""
        return self.tp is not None and self.tp.dim is not None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.tp.shape if self.tp is not None else self.shape

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dims from slowest to fastest in memory; ``(0, 1, ...)`` for a contiguous tensor."""
        contiguous = tuple(range(len(self.shape)))
        if self.stride == contiguous_stride(self.shape):
            return contiguous
        return memory_order(self.shape, self.stride)

    def chunk(self, ranks: int) -> tuple[int, ...]:
        """The shape of each rank's rows when ``torch.chunk`` deals them out, padding of the last ranks included."""
        return tuple(-(-size // ranks) if dim == self.shard_dim else size for dim, size in enumerate(self.shape))

    def in_shape(self, flat: torch.Tensor) -> torch.Tensor:
        """A view in the parameter's shape of ``[numel]`` elements in its memory order."""
        if (order := self.order) == tuple(range(len(order))):
            return flat.view(self.shape)
        return flat.view([self.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])

    def in_memory_order(self, value: torch.Tensor) -> torch.Tensor:
        """The inverse of `in_shape`."""
        return value.permute(self.order).reshape(-1)

    def at(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """`in_shape` of the elements from ``offset`` on in a flat tensor: a single view, instead of a slice and a
        view."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + offset)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """As `torch.empty(shape).stride()`: ``(2, 3)`` -> ``(3, 1)``."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dims as they lie in memory, the slowest first; of equal strides, the longer dim is the slower."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim])))


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """These strides if they are a permutation of contiguous ones without gaps; otherwise the contiguous ones.

    Those of dims of size 1 are what `Leaf.in_shape` makes of them: what a program computes with has the strides that
    were traced. The order is that of ``channels_last``, where a single channel is the fastest dim.
    """
    found, size = [0] * len(shape), 1
    for dim in reversed(memory_order(shape, stride)):
        if shape[dim] > 1 and stride[dim] != size:
            return contiguous_stride(shape)
        found[dim] = size
        size *= max(shape[dim], 1)
    return tuple(found)
