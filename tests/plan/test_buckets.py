"""Units of a sensible size: what is merged, what is cut, and what every choice keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_compiled.plan.buckets import EFFICIENT, MIB, regroup, target
from fsdp_compiled.plan.hardware import CPU, Cluster, machine_of
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.policy import Policy

BLOCKS = ["root"] * 2 + [f"layers.{index // 2}" for index in range(24)] + ["root"]


def units(merge: float, split: float = float("inf"), gathered: bool = True) -> list[str]:
    return list(dict.fromkeys(regroup(BLOCKS, [100] * len(BLOCKS), merge, split, gathered)))


def test_small_neighbours_are_merged_evenly_and_the_rest_comes_first() -> None:
    assert units(0) == ["root", *(f"layers.{index}" for index in range(12))]
    assert units(600) == ["root", "layers.0-2", "layers.3-5", "layers.6-8", "layers.9-11"]
    assert units(1000) == [
        "root",
        "layers.0-3",
        "layers.4-7",
        "layers.8-11",
    ]  # 5 would fit: 4, 4, 4 rather than 2, 5, 5
    assert units(1400) == ["root", "layers.0-5", "layers.6-11"]


def test_a_root_of_next_to_nothing_joins_the_first_unit() -> None:
    sizes = [10, 10, *[100] * 24, 10]
    found = regroup(BLOCKS, sizes, 600, 4000, gathered=True)
    assert list(dict.fromkeys(found)) == ["root-layers.0-2", "layers.3-5", "layers.6-8", "layers.9-11"]
    assert found[-1] == found[0] and found.count(found[0]) == 9
    assert regroup(BLOCKS, sizes, 200, 4000, gathered=True)[0] == "root"  # 30 of 200 are worth a message
    assert regroup(BLOCKS, [10, 10, *[700] * 24, 10], 600, 4000, gathered=True)[0] == "root"  # next to large ones
    assert regroup(BLOCKS, sizes, 0, 4000, gathered=True)[0] == "root"
    assert set(regroup(["root"] * 2, [1, 1], 100, 100, gathered=True)) == {"root"}


def test_a_large_unit_is_cut_between_parameters() -> None:
    found = regroup(["root"] * 3 + ["layers.0"], [100, 300, 50, 100], 0, 200, gathered=True)
    assert found == ["root/0", "root/1", "root/2", "layers.0"]


def test_without_gathers_parameters_are_packed_whatever_their_block_and_the_last_are_first() -> None:
    found = regroup(BLOCKS, [100] * len(BLOCKS), 1000, 1000, gathered=False)
    assert found[0] == "bucket.2" and found[-1] == "bucket.0"
    assert sorted({found.count(name) for name in found}) == [9]


@example([("root", 3), ("root", 1), ("root", 0), ("root", 2)], 0, 1, True)  # an even share is no more than may be
@given(
    st.lists(st.tuples(st.sampled_from(["root", "a.0", "a.1", "a.1.b", "a.2", "c"]), st.integers(0, 50)), min_size=1),
    st.integers(0, 120), st.integers(1, 120), st.booleans(),
)  # fmt: skip
def test_whatever_the_sizes(what: list[tuple[str, int]], merge: int, split: int, gathered: bool) -> None:
    blocks, sizes = [block for block, _ in what], [size for _, size in what]
    found = regroup(blocks, sizes, merge, split, gathered)
    assert len(found) == len(blocks) and all(found)
    for unit in set(found):
        inside = [index for index, name in enumerate(found) if name == unit]
        members = {blocks[index] for index in inside}
        size = sum(sizes[index] for index in inside)
        if gathered and len(members) > 1:
            slight = sum(sizes[index] for index in inside if blocks[index] == "root")
            assert size - slight <= merge and slight * EFFICIENT <= merge
        if gathered and len(members) == 1 and size > split:
            whole = [index for index, block in enumerate(blocks) if block in members]
            assert len(inside) == 1 or sum(sizes[index] for index in whole) <= max(merge, split)
        if not gathered and merge:
            assert inside == list(range(inside[0], inside[-1] + 1)) and (size <= merge or len(inside) == 1)


def test_what_auto_chooses_follows_latency_bandwidth_and_the_model() -> None:
    blocks, sizes = [f"layers.{index}" for index in range(64)], [MIB // 4] * 64

    def merge(machine: Cluster, gathered: bool = True) -> float:
        return target("auto", blocks, sizes, machine, 8, gathered)[0] / MIB

    fast, slow = machine_of(torch.device("cpu")), machine_of(torch.device("cpu"), network=1)
    assert merge(slow) < merge(fast) <= 8  # a slow network is busy with less; half of the model at most
    assert merge(CPU, gathered=False) == 8
    assert target("auto", blocks, sizes, CPU, 1, True)[0] == 0
    assert target(2, blocks, sizes, CPU, 8, True)[:2] == (2 * MIB, 2 * MIB)
    assert target(0, blocks, sizes, CPU, 8, True)[:2] == (0, float("inf"))
    assert "latency" in target("auto", blocks, sizes, CPU, 8, True)[2]


@pytest.mark.parametrize("wanted", [0, 1, "auto"])
def test_one_rank_needs_no_buckets(wanted: float | str) -> None:
    assert target(wanted, ["a"], [10], CPU, 1, True)[0] == 0


def test_a_root_is_cut_between_its_large_parameters() -> None:
    """What is used at the model's two ends; each with the small ones beside it."""
    blocks = ["root", *[f"layers.{index}" for index in range(4)], "root", "root"]

    def found(embedding: int, norm: int, head: int, merge: int, cut: bool = True) -> list[str]:
        row = regroup(blocks, [embedding, *[200] * 4, norm, head], merge, 10_000, True, 0.0, cut)
        return [unit for unit, block in zip(row, blocks, strict=True) if block == "root"]

    assert found(1000, 1, 1000, merge=100) == ["root/0", "root/1", "root/1"]
    assert found(1000, 100, 800, merge=100) == ["root/0", "root/1", "root/1"]
    assert found(1000, 1, 1000, merge=100, cut=False) == ["root"] * 3  # control: along tp
    assert found(150, 1, 150, merge=100) == ["root"] * 3  # for which another message is not worth it
    assert found(1000, 1, 50, merge=100) == ["root"] * 3  # one large one alone
    assert found(1000, 1, 1000, merge=0) == ["root"] * 3  # one unit a block, as was asked for


def test_the_root_of_a_small_model_is_one_message() -> None:
    def roots(rows: int, tp: int = 1) -> int:
        blocks = ["root", *[f"layers.{index}" for index in range(8)], "root"]
        leaves = [
            Leaf((f"p{index}",), (rows, 1024), (1024, 1), torch.float32, True, 0, block)
            for index, block in enumerate(blocks)
        ]
        plan = make_plan(leaves, Policy(), torch.device("cpu"), shard=8, tp=tp)
        return sum(unit.name.startswith("root") for unit in plan.units)

    assert [roots(8), roots(8192), roots(8192, tp=2)] == [1, 2, 1]
