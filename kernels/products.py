"""A matrix product as an operator that writes into a flat buffer.

``product_`` writes a gradient where it is sent from (see `fsdp_compiled.lower.fusions.flatten_gradients`), of factors
in half precision into float32 as well, unrounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import bmm_flop, mm_flop, register_flop_formula

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
product_ = torch.ops.fsdp_compiled.product_.default


@register_flop_formula(product_.overloadpacket)  # type: ignore[untyped-decorator]
def _flops(flat: Any, offset: int, left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int((mm_flop if len(left) == 2 else bmm_flop)(left, right))
