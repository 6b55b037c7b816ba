"""Fake tensors like others, for what a block that nobody walks through returns."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_compiled.ir.nodes import fake_tensor

SOURCE = torch.empty((), device="meta").requires_grad_()  # what `another` is computed from


def another(value: FakeTensor) -> Any:
    """A fake tensor like this one, in memory of its own, which is computed if that one requires a gradient."""
    (made,) = others(value, 1)
    return made


def others(value: FakeTensor, count: int) -> list[Any]:
    """Several such tensors, with one derivative: that takes as long for one as for many."""
    base = value._base if value._is_view() else None
    if base is not None and base.is_contiguous() and value.is_contiguous() and base.dtype == value.dtype:
        if base.numel() == value.numel() and base.requires_grad == value.requires_grad:
            with torch.enable_grad():
                return [one.view(value.shape) for one in others(base, count)]
    shape, strides = tuple(value.shape), value.stride()
    made = [fake_tensor(value.fake_mode, shape, strides, value.dtype, value.device) for _ in range(count)]
    if not value.requires_grad:
        return made
    with torch.enable_grad():
        return list(_Computed.apply(SOURCE, made))


class _Computed(torch.autograd.Function):
    """Says of tensors that they are computed from one that requires a gradient."""

    @staticmethod
    def forward(_ctx: Any, _source: torch.Tensor, made: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(made)
