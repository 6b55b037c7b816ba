"""The layout in which each rank owns rows of every parameter: what `fully_shard` lays out.

    a: [3, 2], b: [4]       rank 0: a0 a0 a1 a1 | b0 b1       rank 1: a2 a2 0 0 | b2 b3
    on two ranks            gathered: rank 0's shard, then rank 1's

Rows are dealt out as `torch.chunk` does, the last ranks' parts filled up with zeros, so that a rank's part of a
parameter is what DTensor calls ``Shard(0)``: everything that knows DTensors (optimizers, checkpoints, initialisation)
is right about it. A gathered parameter lies in as many parts as there are ranks, and is copied into one. FSDP2 lays its
buffers out in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.plan import Buffer, Slot


def widths(buffer: Buffer, world: int) -> list[int]:
    """Elements of each parameter's part on each rank, by slot; together a rank's shard."""
    ends = [*(slot.offset for slot in buffer.slots[1:]), buffer.numel // world]
    return [end - slot.offset for slot, end in zip(buffer.slots, ends, strict=True)]


def own_rows(leaf: Leaf, world: int, rank: int) -> tuple[int, int]:
    """``[first, last + 1)`` of the rows that this rank owns."""
    size = -(-leaf.shape[0] // world)
    return min(rank * size, leaf.shape[0]), min((rank + 1) * size, leaf.shape[0])


def lay_out_by_rows(unit: str, key: str, leaves: Sequence[Leaf], world: int) -> Buffer:
    """A buffer of parameters that share dtype and trainability, each in its chunk of every rank's shard.

    Along tp all of them are cut, or none is.
    """
    slots, offset = [], 0
    for leaf in leaves:
        slots.append(Slot(leaf, offset))
        offset += leaf.chunk(world)
    first = leaves[0]
    numel = world * max(offset, 1)  # nothing is a collective of nothing
    return Buffer(key, unit, first.dtype, first.trainable, None, tuple(slots), numel, by_rows=True, split=first.split)


def side_by_side(unit: str, key: str, buffers: Sequence[Buffer], world: int) -> Buffer:
    """Buffers by rows of one kind as one: on each rank, the shard of the second follows that of the first."""
    slots: list[Slot] = []
    start = 0
    for buffer in buffers:
        slots += (replace(slot, offset=start + slot.offset) for slot in buffer.slots)
        start += buffer.numel // world
    trainable = any(buffer.trainable for buffer in buffers)
    return replace(buffers[0], key=key, unit=unit, slots=tuple(slots), numel=world * start, trainable=trainable)
