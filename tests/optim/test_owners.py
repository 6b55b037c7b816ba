"""Which rank updates which matrix, and how matrices are laid out so that little goes to owners."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compiled import Policy
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.owners import dealt, laid_out, update_cost
from fsdp_compiled.plan.plan import Plan

EAGER = Policy(lower="eager")


def test_work_is_divided_by_cost() -> None:
    assert dealt([9, 4, 4, 1], 2) == [0, 1, 1, 1]
    assert update_cost((4, 8)) == update_cost((8, 4)) == 128 and update_cost((5,)) == 5 and update_cost(()) == 1
    costs = [update_cost((64, 256)), update_cost((256, 64)), *[update_cost((64, 64))] * 4] * 6
    owners = dealt(costs, 4)
    loads = [sum(cost for cost, rank in zip(costs, owners, strict=True) if rank == one) for one in range(4)]
    assert max(loads) < 1.05 * sum(costs) / 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(2, 5))
def test_what_a_rank_has_already_changes_who_not_how_much(sizes: list[int], ranks: int) -> None:
    order = laid_out(sizes, ranks)
    assert sorted(order) == list(range(len(sizes)))
    ends = list(itertools.accumulate((sizes[index] for index in order), initial=0))
    each = sum(sizes) / ranks
    held = [[0] * ranks for _ in sizes]
    for index, (first, last) in zip(order, itertools.pairwise(ends), strict=True):
        for rank in range(ranks):
            held[index][rank] = int(1e3 * max(min(last, (rank + 1) * each) - max(first, rank * each), 0))
    costs = [float(size**2) for size in sizes]

    def busiest(owners: list[int]) -> float:
        return max(sum(cost for cost, who in zip(costs, owners, strict=True) if who == rank) for rank in range(ranks))

    assert busiest(dealt(costs, ranks, held)) <= busiest(dealt(costs, ranks))


def test_few_matrices_are_cut_and_owners_have_most_of_theirs() -> None:
    """A block's matrices are 3, 1, 4 and 4 squares; 6 are a rank's. Of all 48, 24 would have to go to owners, and 8 do
    where all are laid out alike."""
    assert laid_out([3, 1, 4, 4], 2) == [2, 1, 0, 3]
    rows = [(3, 1, 4, 4)[index] for index in laid_out([3, 1, 4, 4], 2)] * 4
    held = [[4, 0], [1, 0], [1, 2], [0, 4]] * 4
    owners = dealt([64.0**2 * row for row in rows], 2, held)
    assert sum(row for row, who in zip(rows, owners, strict=True) if who) == 24
    assert sum(parts[1 - who] for parts, who in zip(held, owners, strict=True)) == 8


def _blocks(shard: int, rows: int = 96, policy: Policy = replace(EAGER, bucket_mb=0), device: str = "cpu") -> Plan:
    """Of four blocks, of a transformer's four matrices each."""
    shapes = [(rows, 32), (32, 32), (128, 32), (32, 128)]
    leaves = [
        Leaf((f"{layer}.{index}",), shape, (shape[1], 1), torch.float32, True, 0, str(layer), owned=True)
        for layer in range(4)
        for index, shape in enumerate(shapes)
    ]
    return make_plan(leaves, policy, torch.device(device), shard)


def _sent(plan: Plan) -> int:
    """Elements to owners; their loads must be as even as can be."""
    costs = {slot.name: update_cost(slot.leaf.shape) for slot, _ in plan._owned}
    loads = [sum(costs[name] for name, who in plan.owners.items() if who == rank) for rank in range(plan.shard)]
    assert max(loads) == max(sum(costs.values()) / plan.shard, *costs.values())
    return sum(sum(held) - held[plan.owners[slot.name]] for slot, held in plan._owned)


def _orders(plan: Plan) -> list[list[str]]:
    return [[slot.name.split(".")[1] for slot in buffer.slots] for buffer in plan.buffers]


@pytest.mark.parametrize(("device", "shard"), [("cuda", "zero3"), ("cpu", "zero1")])
def test_every_other_unit_is_laid_out_from_its_end(device: str, shard: str) -> None:
    """So that of four such blocks no rank has more to do, and half as much goes to owners."""
    plan = _blocks(2, policy=Policy(shard, lower="eager", bucket_mb=0), device=device)
    assert _orders(plan) == [["2", "1", "0", "3"], ["3", "0", "1", "2"]] * 2
    assert _sent(plan) == 4 * 32**2 and not any(buffer.padding for buffer in plan.buffers)
