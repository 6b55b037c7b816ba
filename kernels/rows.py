"""Copies between whole parameters and buffers by rows (`fsdp_compiled.plan.rows`), each one kernel on a GPU.

    split_rows([world, n], [a, b])         -> [world, a], [world, b]     parameters out of a gathered buffer
    join_rows([rows, ...] each, world)     -> [world, n]                 gradients into the buffer that is reduced

Both are operators of PyTorch's that have a CUDA kernel for results that are given (``.out``). Without them,
``split_with_sizes_copy`` is a copy for each parameter, and gradients are cast by a second pass over memory. On a CPU it
is a copy for each parameter in any case; there Inductor compiles `split_form` (`lower.partition`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fsdp_compiled", "FRAGMENT")


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
split_rows, join_rows = torch.ops.fsdp_compiled.split_rows.default, torch.ops.fsdp_compiled.join_rows.default
