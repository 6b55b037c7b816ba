"""The gradients of parameters that lie side by side, as one tensor: that which backward left, or one that they are put
into, where the loop put others in ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fsdp_compiled.runtime.loop.flat_state import Part


def flat_gradient(part: Part) -> torch.Tensor | None:
    """The parameters' gradients, in their places in the flat shard; None where some are missing."""
    size, dtype = part.row.tensor.numel(), part.row.tensor.dtype
    found: list[tuple[torch.Tensor, int, int]] = []
    for entry, first, last in part.places():
        gradient = entry.parameter.grad
        if type(gradient) is not DTensor or gradient.dtype != dtype:
            return None
        if gradient._spec is not entry.spec and gradient._spec != entry.spec:
            return None
        found.append((gradient._local_tensor, first, last))
    whole = _side_by_side(found, size)
    if whole is None:
        whole = torch.zeros(size, dtype=dtype, device=part.row.tensor.device)
        for local, first, last in found:
            whole[first:last].view(local.shape).copy_(local)
    return whole


def _side_by_side(found: Sequence[tuple[torch.Tensor, int, int]], size: int) -> torch.Tensor | None:
    """The memory that these are slices of, if they are, in their places, and fill it."""
    if sum(last - first for _, first, last in found) != size:
        return None  # what is between them need not be zero
    anchor, start = next((local, first) for local, first, last in found if last > first)
    begin = anchor.storage_offset() - start
    storage = anchor.untyped_storage()
    if begin < 0 or (begin + size) * anchor.itemsize > storage.nbytes():
        return None
    address = storage.data_ptr() + begin * anchor.itemsize
    for local, first, last in found:
        if last > first and (local.data_ptr() != address + first * anchor.itemsize or not local.is_contiguous()):
            return None
    return anchor.as_strided((size,), (1,), begin)
