"""All-gathers of the functional collectives on CPUs, by the one of gloo's two forms that does not corrupt memory; what
two ranks gather or reduce-scatter goes by `gloo_pairs`.

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

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_compiled.distributed import gloo_pairs

c10d = torch.ops._c10d_functional
given = c10d.all_gather_into_tensor_out.default
_replaced: list[torch.library.Library] = []  # the kernels, for as long as the process lives


def replace_kernels() -> None:
    """From now on, in this process; once."""
    if not _replaced:
        library = torch.library.Library("_c10d_functional", "IMPL", "CPU")
        library.impl("all_gather_into_tensor", _gather)
        library.impl("all_gather_into_tensor_coalesced", _gather_several)
        library.impl("reduce_scatter_tensor", _reduce)
        _replaced.append(library)


def _gather(tensor: Tensor, world: int, group: str) -> Tensor:
    if tensor.dim() != 1 or tensor.is_complex() or not tensor.is_contiguous():
        return _gather_several([tensor], world, group)[0]
    full = tensor.new_empty(world * len(tensor))  # a flat shard, at half the price of what suits all
    return _into(full, tensor, world, group)


def _gather_several(tensors: list[Tensor], world: int, group: str) -> list[Tensor]:
    """``[n, ...]`` on each rank -> ``[world * n, ...]``, to be waited for; a number -> ``[world]``."""
    dense = [tensor.contiguous() for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in dense]
    whole = [tensor.new_empty(world * tensor.numel()) for tensor in real]
    for tensor, full in zip(real, whole, strict=True):
        _into(full, tensor.view(-1), world, group)
    shaped = [full.view(_shape(tensor, world)) for tensor, full in zip(real, whole, strict=True)]
    pairs = zip(tensors, shaped, strict=True)
    return [torch.view_as_complex(full) if tensor.is_complex() else full for tensor, full in pairs]


def _gather_unpadded(shard: Tensor, filled: Sequence[int], world: int, group: str) -> Tensor:
    """A flat shard of two ranks, of which this much comes before padding, on either."""
    full = min(filled) == len(shard)
    return _gather(shard, world, group) if full else gloo_pairs.gather(shard, group, filled)


def _gather_several_unpadded(shards: list[Tensor], filled: list[int], world: int, group: str) -> list[Tensor]:
    pairs = zip(filled[::2], filled[1::2], strict=True)
    return [_gather_unpadded(shard, pair, world, group) for shard, pair in zip(shards, pairs, strict=True)]


def _reduce_unpadded(flat: Tensor, how: str, filled: list[int], world: int, group: str) -> Tensor:
    return gloo_pairs.reduce(flat, how, group, filled)


UNPADDED = {}  # by collective, what does the same and sends no padding. ``filled``: by buffer, and by rank of its two
for _name, _given, _kernel, _shapes in (
    (
        "all_gather_into_tensor",
        "(Tensor shard, int[] filled, int world, str group) -> Tensor",
        _gather_unpadded,
        lambda shard, filled, world, group: shard.new_empty(world * len(shard)),
    ),
    (
        "all_gather_into_tensor_coalesced",
        "(Tensor[] shards, int[] filled, int world, str group) -> Tensor[]",
        _gather_several_unpadded,
        lambda shards, filled, world, group: [shard.new_empty(world * len(shard)) for shard in shards],
    ),
    (
        "reduce_scatter_tensor",
        "(Tensor flat, str how, int[] filled, int world, str group) -> Tensor",
        _reduce_unpadded,
        lambda flat, how, filled, world, group: flat.new_empty(len(flat) // world),
    ),
):
    torch.library.define(f"fsdp_compiled_pairs::{_name}", _given)
    torch.library.impl(f"fsdp_compiled_pairs::{_name}", "CPU", _kernel)
    torch.library.register_fake(f"fsdp_compiled_pairs::{_name}", _shapes)
    UNPADDED[getattr(c10d, _name).default] = getattr(torch.ops.fsdp_compiled_pairs, _name).default


def _into(full: Tensor, tensor: Tensor, world: int, group: str) -> Tensor:
    """``[world * n]``, of ``[n]`` on each rank."""
    if world != 2 or not len(tensor):
        return given(tensor, world, group, out=full)  # type: ignore[no-any-return]
    return gloo_pairs.gather(tensor, group, full=full)


def _reduce(tensor: Tensor, how: str, world: int, group: str) -> Tensor:
    """``[world * n]`` on each rank -> ``[n]``."""
    flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.is_floating_point()
    if world != 2 or not flat or not len(tensor) or how not in ("sum", "avg"):
        return c10d.reduce_scatter_tensor_coalesced([tensor], how, world, group)[0]  # type: ignore[no-any-return]
    return gloo_pairs.reduce(tensor, how, group)


def _shape(tensor: Tensor, world: int) -> tuple[int, ...]:
    return (world * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (world,)
