"""The layout of `fully_shard`: each rank owns rows of every parameter.

    a: [3, 2], b: [4]       rank 0: a0 a0 a1 a1 | b0 b1       rank 1: a2 a2 0 0 | b2 b3
    on two ranks            gathered: rank 0's shard, then rank 1's

Rows are dealt out as by `torch.chunk`, with zeros after the last ranks' parts, so that a rank's part of a parameter is
what DTensor calls ``Shard(0)``: all code for DTensors (optimizers, checkpoints, initialisation) works on it. A gathered
parameter lies in as many parts as there are ranks, and is copied into one. FSDP2 lays its buffers out in the same way.

Ranks may divide another dim of a parameter (`Leaf.shard_dim`), for example where there are fewer experts than ranks.
Its chunks of that dim then lie in the place of rows, ``Shard(1)``. The dim must be a multiple of the ranks.

    a: [2, 4], dim 1        rank 0: a00 a01 a10 a11       rank 1: a02 a03 a12 a13
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.plan import Buffer, Slot


def widths(buffer: Buffer, world: int) -> list[int]:
    """The number of elements of each parameter's part on each rank, by slot. Together they are a rank's shard."""
    ends = [*(slot.offset for slot in buffer.slots[1:]), buffer.numel // world]
    return [end - slot.offset for slot, end in zip(buffer.slots, ends, strict=True)]


def own_rows(leaf: Leaf, world: int, rank: int) -> tuple[int, int]:
    """``[first, last + 1)`` of the rows that this rank owns."""
    rows, size = leaf.shape[leaf.shard_dim], leaf.chunk(world)[leaf.shard_dim]
    return min(rank * size, rows), min((rank + 1) * size, rows)


def whole(parts: torch.Tensor, leaf: Leaf, world: int) -> torch.Tensor:
    """The whole parameter, from its parts in all ranks' shards: ``[world, n]``, with zeros after the last row."""
    if leaf.shard_dim == 0:
        return parts.reshape(-1)[: leaf.numel].view(leaf.shape)
    return parts.reshape(world, *leaf.chunk(world)).movedim(0, leaf.shard_dim).reshape(leaf.shape)


def lay_out_by_rows(unit: str, key: str, leaves: Sequence[Leaf], world: int) -> Buffer:
    """A buffer of parameters that share dtype and trainability. Each has its chunk in every rank's shard.

    Along tp, either all of them are cut or none is.
    """
    slots, offset = [], 0
    for leaf in leaves:
        slots.append(Slot(leaf, offset))
        offset += math.prod(leaf.chunk(world))
    first = leaves[0]
    numel = world * max(offset, 1)  # a collective of no elements is not possible
    return Buffer(key, unit, first.dtype, first.trainable, None, tuple(slots), numel, by_rows=True, split=first.split)


def side_by_side(unit: str, key: str, buffers: Sequence[Buffer], world: int) -> Buffer:
    """Merges buffers by rows of one kind. On each rank, the shard of the second follows that of the first."""
    slots: list[Slot] = []
    start = 0
    for buffer in buffers:
        slots += (replace(slot, offset=start + slot.offset) for slot in buffer.slots)
        start += buffer.numel // world
    trainable = any(buffer.trainable for buffer in buffers)
    return replace(buffers[0], key=key, unit=unit, slots=tuple(slots), numel=world * start, trainable=trainable)
