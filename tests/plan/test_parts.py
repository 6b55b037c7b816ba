"""Which elements of a parameter each rank's shard has, and where, of flat ranges and of rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsdp_compiled.plan.leaf import Leaf, contiguous_stride, dense_stride
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Buffer, Part, Slot
from fsdp_compiled.plan.rows import lay_out_by_rows, own_rows, whole
from fsdp_compiled.policy import Policy

SHAPES = [(7, 5), (3,), (1, 2), (16, 4), (0, 3), (40,)]


def leaves(shapes: list[tuple[int, ...]]) -> list[Leaf]:
    return [
        Leaf((f"p{index}",), shape, contiguous_stride(shape), torch.float32, True, 0, "root")
        for index, shape in enumerate(shapes)
    ]


def elements(slot: Slot) -> torch.Tensor:
    """A number for each element of all parameters, none of them 0."""
    return torch.arange(slot.leaf.numel) + 1 + 1000 * int(slot.name[1:])


def flat(ranks: int) -> tuple[Buffer, list[torch.Tensor]]:
    plan = make_plan(leaves([*SHAPES, ()]), Policy(bucket_mb=1), torch.device("cpu"), shard=ranks)
    (buffer,) = plan.buffers
    whole = torch.zeros(buffer.numel, dtype=torch.int64)
    for slot in buffer.slots:
        whole[slot.offset : slot.offset + slot.leaf.numel] = elements(slot)
    return buffer, list(whole.chunk(ranks))


def rows(ranks: int) -> tuple[Buffer, list[torch.Tensor]]:
    buffer = lay_out_by_rows("root", "root", leaves(SHAPES), ranks)
    shards = list(torch.zeros(ranks, buffer.numel // ranks, dtype=torch.int64))
    for slot in buffer.slots:
        for shard, own in zip(shards, elements(slot).view(slot.leaf.shape).chunk(ranks), strict=False):
            shard[slot.offset : slot.offset + own.numel()] = own.flatten()
    return buffer, shards


LAYOUTS = {"flat": flat, "rows": rows}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_all_ranks_are_the_parameter(layout: str, ranks: int) -> None:
    buffer, shards = LAYOUTS[layout](ranks)
    seen = [torch.zeros_like(shard) for shard in shards]
    for slot in buffer.slots:
        parts = [buffer.part(slot, rank, ranks) for rank in range(ranks)]
        assert torch.equal(
            torch.cat([part.of(shard) for part, shard in zip(parts, shards, strict=True)]), elements(slot)
        )
        for part, shard, mark in zip(parts, shards, seen, strict=True):
            assert 0 <= part.first <= part.last <= slot.leaf.numel and part.end <= len(shard)
            assert torch.equal(part.of(shard), elements(slot)[part.first : part.last])
            part.of(mark).add_(1)
    for shard, mark in zip(shards, seen, strict=True):
        assert torch.equal(mark, (shard > 0).to(mark.dtype))  # each element once, and no padding
    assert sum(map(math.prod, SHAPES)) <= sum(int(mark.sum()) for mark in seen)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_is_moved_is_told(layout: str) -> None:
    buffer, shards = LAYOUTS[layout](2)
    slot = buffer.slots[0]
    part = buffer.part(slot, 0, 2)
    moved = replace(part, offset=part.offset + 1)
    assert torch.equal(part.of(shards[0]), elements(slot)[part.first : part.last])
    assert not torch.equal(moved.of(shards[0]), elements(slot)[part.first : part.last])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_one_rank_the_part_is_all_whatever_its_number_is(layout: str) -> None:
    buffer, _ = LAYOUTS[layout](1)
    for slot in buffer.slots:
        assert buffer.part(slot, 3, 1) == buffer.part(slot, 0, 1) == Part(0, slot.leaf.numel, slot.offset)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_whole_parameters_are_put_together_of_chunks_of_any_dim(dim: int, ranks: int) -> None:
    shapes = [(4, 8, 4), (8, 4, 4)]
    given = [replace(leaf, shard_dim=dim) for leaf in leaves(shapes)]
    buffer = lay_out_by_rows("root", "root", given, ranks)
    for slot in buffer.slots:
        leaf, values = slot.leaf, elements(slot).view(slot.leaf.shape)
        own = [own_rows(leaf, ranks, rank) for rank in range(ranks)]
        parts = torch.stack([values.narrow(dim, first, last - first).flatten() for first, last in own])
        sizes = [buffer.part(slot, rank, ranks).numel for rank in range(ranks)]
        assert sizes == [parts.shape[1]] * ranks == [math.prod(leaf.chunk(ranks))] * ranks
        assert torch.equal(whole(parts, leaf, ranks), values)
        other = whole(parts, replace(leaf, shard_dim=(dim + 1) % 3), ranks)
        assert torch.equal(other, values) == (ranks == 1)


@pytest.mark.parametrize("kept", [True, False], ids=["in this order", "not dense in it"])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 3, 2, 2), ((12, 1, 6, 3), (12, 1, 6, 4))),
        ((4, 1, 2, 2), ((4, 1, 2, 1), (4, 4, 2, 2))),  # one channel, channels last
        ((4, 3, 1, 1), ((3, 1, 3, 3), (6, 1, 3, 3))),
        ((1, 3, 1), ((3, 1, 3), (3, 2, 1))),
        ((3, 1), ((1, 3), (2, 1))),
        ((2, 1, 3), ((1, 2, 2), (3, 7, 2))),
        ((2, 0, 3), ((1, 6, 2), (9, 9, 9))),
        ((), ((), ())),
    ],
)
def test_a_view_of_memory_has_the_strides_that_a_program_was_traced_with(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], kept: bool
) -> None:
    given = strides[0 if kept else 1]
    (leaf,) = leaves([shape])
    leaf = replace(leaf, stride=dense_stride(shape, given))
    if kept:
        assert leaf.stride == given
    assert leaf.in_shape(torch.zeros(leaf.numel)).stride() == leaf.stride


def test_a_stride_of_a_single_element_that_no_view_has_is_replaced() -> None:
    assert dense_stride((2, 1, 3), (3, 7, 1)) == (3, 6, 1)
