"""Operators of this package's that ATen's own kernels carry out, with what those lack: no Triton is needed for them.

**Rows**: copies between whole parameters and buffers by rows (`fsdp_compiled.plan.rows`), each one kernel on a GPU.

    split_rows([world, n], [a, b])         -> [world, a], [world, b]     parameters out of a gathered buffer
    join_rows([rows, ...] each, world)     -> [world, n]                 gradients into the buffer that is reduced

Both are operators of PyTorch's that have a CUDA kernel for results that are given (``.out``). Without them,
``split_with_sizes_copy`` is a copy for each parameter, and gradients are cast by a second pass over memory. On a CPU it
is a copy for each parameter in any case; there Inductor compiles `split_form` (`lower.partition`).

**A matrix product** that writes into a flat buffer: ``product_`` writes a gradient where it is sent from (see
`fsdp_compiled.lower.fusions.flatten_gradients`), of factors in half precision into float32 as well, unrounded.

**Scaled sums**, ``self += scale * ...`` in place, where the scale is a 0-d tensor. ATen's ``add_(alpha=)``,
``addcdiv_(value=)`` and ``addcmul_(value=)`` take Python numbers, which a program would freeze when it is captured; a
step count or a learning rate lives in a tensor. On a CPU the number is read from the tensor and ATen's own kernel runs,
so that the rounding is that of the eager optimizer. On a GPU nothing is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import bmm_flop, mm_flop, register_flop_formula

_LIBRARY = torch.library.Library("fsdp_compiled", "FRAGMENT")
operators = torch.ops.fsdp_compiled


def _split(parts: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    made = _parts(parts, sizes)
    torch.split_with_sizes_copy(parts, sizes, 1, out=made)
    return made


def _join(gradients: Sequence[Tensor], world: int, dtype: torch.dtype) -> Tensor:
    return torch._chunk_cat(gradients, 0, world, out=_joined(gradients, world, dtype))


def _parts(parts: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [parts.new_empty((len(parts), size)) for size in sizes]


def _joined(gradients: Sequence[Tensor], world: int, dtype: torch.dtype) -> Tensor:
    size = sum(-(-len(one) // world) * math.prod(one.shape[1:]) for one in gradients)
    return gradients[0].new_empty((world, size), dtype=dtype)


def split_form(parts: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """What compilers see in the place of `split_rows`."""
    return [part.contiguous() for part in parts.split(sizes, 1)]


_LIBRARY.define("split_rows(Tensor parts, int[] sizes) -> Tensor[]")
_LIBRARY.define("join_rows(Tensor[] gradients, int world, ScalarType dtype) -> Tensor")
_LIBRARY.impl("split_rows", _split, "CompositeExplicitAutograd")
_LIBRARY.impl("join_rows", _join, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_compiled::split_rows", _parts, lib=_LIBRARY)
torch.library.register_fake("fsdp_compiled::join_rows", _joined, lib=_LIBRARY)
split_rows, join_rows = operators.split_rows.default, operators.join_rows.default

torch.library.define(
    "fsdp_compiled::product_",
    "(Tensor(a!) flat, int offset, Tensor left, Tensor right) -> ()",
    tags=torch.Tag.flexible_layout,
)


def _product(flat: Tensor, offset: int, left: Tensor, right: Tensor) -> None:
    """``flat[offset : offset + n] = left @ right``, matrices or batches of them, of any strides, row by row."""
    shape = (*left.shape[:-1], right.shape[-1])
    out = flat[offset : offset + math.prod(shape)].view(shape)
    if flat.dtype == left.dtype:
        (torch.mm if len(shape) == 2 else torch.bmm)(left, right, out=out)
    elif flat.device.type == "cuda":
        (torch.mm if len(shape) == 2 else torch.bmm)(left, right, out_dtype=flat.dtype, out=out)
    else:  # PyTorch has no such product there; its meaning, for tests
        torch.matmul(left.to(flat.dtype), right.to(flat.dtype), out=out)


def widening(device: torch.device) -> str:
    """Why products of bfloat16 cannot be written in float32 on this device; empty where they can. Waits for it."""
    left, right = (torch.full((1, 16, 16), 1 / 3, dtype=torch.bfloat16, device=device) for _ in range(2))
    exact = (left.float() @ right.float()).cpu()
    try:
        single = torch.mm(left[0], right[0], out_dtype=torch.float32, out=torch.empty(16, 16, device=device))
        batch = torch.bmm(left, right, out_dtype=torch.float32, out=torch.empty(1, 16, 16, device=device))
        if all(torch.allclose(found.cpu(), exact, rtol=1e-5) for found in (single, batch)):
            return ""
        return "torch.mm(..., out_dtype=torch.float32) gives other numbers than the product in float32"
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
        return f"torch.mm(..., out_dtype=torch.float32): {str(error).splitlines()[0]}"


torch.library.impl("fsdp_compiled::product_", ("CPU", "CUDA"), _product)
torch.library.register_fake("fsdp_compiled::product_", lambda *_: None)
product_ = operators.product_.default


@register_flop_formula(product_.overloadpacket)  # type: ignore[untyped-decorator]
def _flops(flat: Any, offset: int, left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int((mm_flop if len(left) == 2 else bmm_flop)(left, right))


_SCHEMAS = {
    "add_": "(Tensor(a!) self, Tensor other, Tensor alpha) -> ()",
    "addcdiv_": "(Tensor(a!) self, Tensor tensor1, Tensor tensor2, Tensor value) -> ()",
    "addcmul_": "(Tensor(a!) self, Tensor tensor1, Tensor tensor2, Tensor value) -> ()",
}


def add_(self: Tensor, other: Tensor, alpha: Tensor) -> None:
    """``self += alpha * other``."""
    self.add_(other * alpha.to(self.dtype))


def addcdiv_(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Tensor) -> None:
    """``self += value * tensor1 / tensor2``."""
    self.add_(value.to(self.dtype) * tensor1 / tensor2)


def addcmul_(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Tensor) -> None:
    """``self += value * tensor1 * tensor2``."""
    self.add_(value.to(self.dtype) * tensor1 * tensor2)


# What compilers see in the place of an operator, and what runs on a GPU: nothing here reads the scale on the host.
TENSOR_FORMS: dict[str, Callable[..., None]] = {"add_": add_, "addcdiv_": addcdiv_, "addcmul_": addcmul_}


def _aten(name: str) -> Callable[..., None]:
    method, keyword = getattr(Tensor, name), "alpha" if name == "add_" else "value"

    def run(self: Tensor, *tensors: Tensor) -> None:
        *others, scale = tensors
        method(self, *others, **{keyword: scale.item()})

    return run


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}{_schema}", tags=(torch.Tag.pointwise,))
    _LIBRARY.impl(_name, _aten(_name), "CPU")
    _LIBRARY.impl(_name, TENSOR_FORMS[_name], "CUDA")
    _LIBRARY.impl(_name, lambda *_: None, "Meta")
