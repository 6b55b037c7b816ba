"""All-gathers of the functional collectives on CPUs, by the one of gloo's two forms that does not corrupt memory.

gloo's threads, two a group, note the name of the operator that they ended in one string of the group, which nothing
locks (`ProcessGroupGloo::runLoop`, ``pgStatus_->lastCompletedWorkName``; torch 2.11 and 2.13). A name of up to 15
letters is copied in place. A longer one moves memory, and two threads at once free the same: ``malloc(): unaligned
tcache chunk detected``, or a segmentation fault, after some thousands of collectives. Of the operators that
`torch.ops._c10d_functional` comes to, only ``all_gather_into_tensor`` has such a name, since it is one of a list
(``ALLGATHER_COALESCED``); into a tensor that is given it is ``_ALLGATHER_BASE``, which is short, and what FSDP2 sends.

So from a process's first mesh of CPUs on, both all-gathers of CPU tensors gather into tensors that are made here, and
PyTorch's own users of them, as DTensor, are helped too. Values, shapes and what is waited for are the same; every
backend of CPUs has this form.
"""

from __future__ import annotations

import torch
from torch import Tensor

c10d = torch.ops._c10d_functional
given = c10d.all_gather_into_tensor_out.default
_replaced: list[torch.library.Library] = []  # the kernels, for as long as the process lives


def replace_kernels() -> None:
    """From now on, in this process; once."""
    if not _replaced:
        library = torch.library.Library("_c10d_functional", "IMPL", "CPU")
        library.impl("all_gather_into_tensor", _gather)
        library.impl("all_gather_into_tensor_coalesced", _gather_several)
        _replaced.append(library)


def _gather(tensor: Tensor, world: int, group: str) -> Tensor:
    if tensor.dim() != 1 or tensor.is_complex() or not tensor.is_contiguous():
        return _gather_several([tensor], world, group)[0]
    full = tensor.new_empty(world * len(tensor))  # a flat shard, at half the price of what suits all
    return given(tensor, world, group, out=full)  # type: ignore[no-any-return]


def _gather_several(tensors: list[Tensor], world: int, group: str) -> list[Tensor]:
    """``[n, ...]`` on each rank -> ``[world * n, ...]``, to be waited for; a number -> ``[world]``."""
    dense = [tensor.contiguous() for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in dense]
    whole = [tensor.new_empty(world * tensor.numel()) for tensor in real]
    for tensor, full in zip(real, whole, strict=True):
        given(tensor.view(-1), world, group, out=full)
    shaped = [full.view(_shape(tensor, world)) for tensor, full in zip(real, whole, strict=True)]
    pairs = zip(tensors, shaped, strict=True)
    return [torch.view_as_complex(full) if tensor.is_complex() else full for tensor, full in pairs]


def _shape(tensor: Tensor, world: int) -> tuple[int, ...]:
    return (world * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (world,)
