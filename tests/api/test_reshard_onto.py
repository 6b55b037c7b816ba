"""Units that stay cut over neighbours between forward and backward: `Policy.reshard_onto`, and FSDP2's
``reshard_after_forward`` as a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Program
from fsdp_compiled.ir.nodes import is_collective, role_of
from fsdp_compiled.plan.hardware import gpus
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.simulate import simulate as estimated
from tests.launch import results_of
from tests.simulate import Simulation, simulate, stages
from tests.toys import build

results = results_of(Path(__file__).parents[1] / "workers" / "reshard_onto.py", 4)
ROWS, WIDTH = 3, 8


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def trained(shard: int, replicate: int, damage: Callable[..., Program] | None = None, **fields: Any) -> Simulation:
    model = build(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    rows = [
        [(x, (x.sum(1) > 0).long()) for x in torch.randn(shard * replicate, ROWS, WIDTH, generator=generator)]
        for _ in range(4)
    ]
    policy = Policy(**{"lower": "eager", "bucket_mb": 0, **fields})
    return simulate(
        model, optimizer, loss, rows, policy, shard=shard, replicate=replicate, damage=damage, traced_as="reshard onto",
        microbatches=2 if "accumulate" in fields else 1,
    )  # fmt: skip


def of_the_first(program: Program, plan: Plan) -> Program:
    """A control: each rank keeps the part of the first of its neighbours."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.remainder.Scalar:
            node.args = (node.args[0], 1)
    return program


def same(one: Simulation, two: Simulation) -> bool:
    pairs = [*zip(one.losses, two.losses, strict=True)]
    pairs += [(value, two.parameters[name]) for name, value in one.parameters.items()]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("shard", "replicate", "onto", "fields"),
    [
        (4, 1, 2, {}),
        (8, 1, 4, {}),
        (4, 2, 2, {}),
        (6, 1, 3, {}),
        (8, 1, 2, {"wire": "int8"}),
        (4, 1, 2, {"accumulate": "full"}),
        (4, 1, 2, {"recompute": "unit", "limit": 2}),
        (4, 1, 2, {"offload": True}),
        (4, 1, 2, {"loss_scale": "dynamic", "clip": 0.1, "weigh": "rows"}),
    ],
)
def test_numbers_are_those_without(shard: int, replicate: int, onto: int, fields: dict[str, Any]) -> None:
    before, after = trained(shard, replicate, **fields), trained(shard, replicate, reshard_onto=onto, **fields)
    assert same(before, after) and after.replicas_agree
    assert before.program.text() != after.program.text()


def test_a_part_of_another_rank_is_noticed() -> None:
    assert not same(trained(4, 1), trained(4, 1, of_the_first, reshard_onto=2))


def gathers(program: Program, phase: str) -> list[tuple[int, str]]:
    """What a rank gives to each gather, in elements, and the axis."""
    return [
        (sum(source.meta["val"].numel() for source in node.all_input_nodes), str(node.args[-1]))
        for node in program.graph.nodes
        if is_collective(node) and role_of(node) == "gather" and node.meta["phase"] == phase
    ]


def test_backward_gathers_among_neighbours_what_forward_kept() -> None:
    model = build(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64))
    policy = Policy(lower="eager", bucket_mb=0, reshard_onto=2)
    found, plan = stages(model, optimizer, loss, batch, policy, shard=8)
    sizes = {buffer.unit: buffer.numel for buffer in plan.buffers}
    assert gathers(found[-1], "forward") == [(sizes[unit.name] // 8, "shard") for unit in plan.units]
    backward = gathers(found[-1], "backward")
    assert backward == [(sizes[f"blocks.{number}"] // 2, "each 2 ranks") for number in (2, 1, 0)]
    kept = [node for node in found[-1].graph.nodes if node.target is torch.ops.aten.index_select.default]
    assert len(kept) == 3 and all(node.meta["phase"] == "forward" for node in kept)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reshard_onto": 1}, "whole number, 2 or more"),
        ({"reshard_onto": True}, "whole number, 2 or more"),
        ({"reshard_onto": 2, "shard": "zero2"}, 'Give shard="zero3"'),
    ],
)
def test_what_a_policy_cannot_mean_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Policy(**fields)


def test_over_a_slow_network_it_takes_less_time_and_more_memory() -> None:
    """Two nodes of eight; the parameters cross the network between them once a step in the place of twice."""
    width = 2048

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)))

    def of_mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    cluster = gpus("H100", node=8, nic=1e9)
    batch = (torch.empty(64, width, device="meta"),)
    whole, onto = (
        estimated(make, of_mean, batch, 16, cluster, Policy(lower="eager", reshard_onto=number)) for number in (None, 8)
    )
    assert onto.seconds / whole.seconds == pytest.approx(3 / 4, abs=0.01), "of 4 units, 3 are gathered again"
    weights = 6 * (width * width + width) * 4
    more = onto.memory.peak.nbytes - whole.memory.peak.nbytes
    assert 0 < more <= weights / 8 * 1.1


def test_fully_shard_is_fsdp2_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["is_fsdp2"] == [True] * 3


def test_compile_sharded_computes_what_it_does_without(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert len(rank["is_what_it_is_without"]) == 3
        assert all(rank["is_what_it_is_without"].values()), rank["is_what_it_is_without"]


def test_groups_of_neighbours_are_made_once(results: list[dict[str, Any]]) -> None:
    assert [rank["several_models"] for rank in results] == [0] * 4


def test_ranks_that_do_not_divide_are_refused(results: list[dict[str, Any]]) -> None:
    for rank in results:
        loop, policy, untouched = rank["refused"]
        assert "reshard_after_forward is 3; expected True, False, None, or a number of ranks that divides the 4" in loop
        assert "Policy.reshard_onto=3 does not divide the 4 ranks" in policy and untouched


def test_ranks_that_disagree_have_an_error_each(results: list[dict[str, Any]]) -> None:
    for rank in results:
        loop, policy = rank["disagree"]
        assert loop.startswith("RankError") and "resharded onto" in loop
        assert policy.startswith("RankError") and "reshard_onto" in policy
