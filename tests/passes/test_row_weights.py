"""Policy(weigh="rows"): ranks count by their rows, on simulated ranks, against one process on all rows."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.ir.nodes import is_collective
from fsdp_compiled.policy import PLACEMENTS
from tests.chosen import chosen
from tests.simulate import Simulation, simulate, stages
from tests.toys import batches, build, mse, sgd

ROWS = Policy(lower="eager", weigh="rows", bucket_mb=0)
Steps = list[list[tuple[torch.Tensor, torch.Tensor]]]


def one_process(model: nn.Module, steps: Steps, weights: list[list[float]], row: int = 1) -> list[float]:
    """Trains on all ranks' batches, ``row`` of them a step, each as much as it weighs. Losses."""
    optimizer, losses = sgd(model), []
    for start in range(0, len(steps), row):
        found = [
            (weight, batch)
            for index in range(start, start + row)
            for weight, batch in zip(weights[index], steps[index], strict=True)
            if weight
        ]
        optimizer.zero_grad()
        loss = sum(weight * mse(model, *batch) for weight, batch in found) / sum(weight for weight, _ in found)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
    return losses


def off(simulation: Simulation, model: nn.Module) -> float:
    found = simulation.parameters
    return max(((found[name] - value).norm() / value.norm()).item() for name, value in model.named_parameters())


@pytest.mark.parametrize(
    ("microbatches", "shard"),
    chosen(
        [(count, shard) for count in (1, 2) for shard in PLACEMENTS],
        [(1, "zero3"), (2, "ddp")],
    ),
)
def test_a_step_is_that_of_one_process_on_all_rows(shard: str, microbatches: int) -> None:
    """Among them a rank that has none, and whose numbers are not finite: they count nothing."""
    stream = iter(batches(8))
    steps = [[next(stream), next(stream)] for _ in range(4)]
    weights = [[5.0, 3.0], [2.0, 0.0], [7.0, 1.0], [0.0, 4.0]]
    steps[1][1] = (steps[1][1][0] * torch.nan, steps[1][1][1])
    model = build()
    policy = replace(ROWS, shard=shard, clip=0.3)
    simulation = simulate(model, sgd(model), mse, steps, policy, microbatches=microbatches, weights=weights)
    plain, same = copy.deepcopy(model), copy.deepcopy(model)
    expected = one_process(plain, steps, weights, microbatches)
    one_process(same, steps, [[float(weight > 0) for weight in row] for row in weights], microbatches)
    torch.testing.assert_close(torch.stack(simulation.losses), torch.tensor(expected), rtol=1e-6, atol=0)
    assert off(simulation, plain) <= 1e-6 < off(simulation, same)
    assert simulation.replicas_agree


@pytest.mark.parametrize(
    ("accumulate", "shard", "replicate"),
    chosen(
        [(how, *mesh) for how in ("shards", "full") for mesh in ((4, 1), (2, 2))],
        [("full", 2, 2)],
    ),
)
def test_four_ranks_and_a_mesh_of_two_by_two(shard: int, replicate: int, accumulate: str) -> None:
    stream = iter(batches(8))
    steps = [[next(stream) for _ in range(4)] for _ in range(2)]
    weights = [[5.0, 3.0, 0.0, 1.0], [2.0, 0.0, 0.0, 9.0]]
    model = build()
    policy = replace(ROWS, clip=0.3, accumulate=accumulate)
    simulation = simulate(
        model, sgd(model), mse, steps, policy, shard=shard, replicate=replicate, microbatches=2, weights=weights
    )
    plain = copy.deepcopy(model)
    expected = one_process(plain, steps, weights, 2)
    torch.testing.assert_close(simulation.losses[0].item(), expected[0], rtol=1e-6, atol=0)
    assert off(simulation, plain) <= 1e-6
    assert simulation.replicas_agree


def test_no_collective_is_added() -> None:
    model = build()

    def sent(policy: Policy) -> list[str]:
        programs, _ = stages(model, sgd(model), mse, batches(1)[0], policy)
        return [
            str(node.target) for node in programs[-1].graph.nodes if node.op == "call_function" and is_collective(node)
        ]

    assert sent(ROWS) == sent(replace(ROWS, weigh="ranks")) != []


def test_a_rank_without_rows_keeps_its_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    steps = [batches(2)]
    simulation = simulate(model, sgd(model), mse, steps, ROWS, weights=[[5.0, 0.0]])
    first, second = simulation.buffers
    for name, value in model.named_buffers():
        assert torch.equal(second[name], value) and not torch.equal(first[name], value)


class Last(nn.Module):
    """Replaces a buffer, and reads nothing of what it held."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.mean(0)
        return self.linear(x)


def test_a_buffer_that_nothing_reads_is_replaced_where_there_are_rows() -> None:
    model, steps = Last(), [batches(2)]
    simulation = simulate(model, sgd(model), mse, steps, ROWS, weights=[[5.0, 0.0]])
    first, second = (found["last"] for found in simulation.buffers)
    torch.testing.assert_close(first, steps[0][0][0].mean(0))
    assert not second.any()


def test_the_first_tensors_length_is_what_counts_and_is_needed() -> None:
    def loss(model: nn.Module, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(model, x, y) * scale

    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=loss, policy=replace(ROWS, dynamic=True))
    optimizer = sgd(plain)
    scale = torch.tensor(2.0)
    x, y = batches(1, rows=9)[0]
    sharded.accumulate(scale, x[:2], y[:2])
    loss_ = sharded.step(scale, x[2:], y[2:])  # seven rows of nine
    expected = loss(plain, scale, x, y)
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(loss_, expected.detach(), rtol=1e-6, atol=0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(sharded.full_state_dict()[name], value, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="has no tensor with rows"):
        sharded.value_and_grad(scale, scale, scale)


class Skips(nn.Module):
    """Its second layer is a unit of its own, which no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


@pytest.mark.parametrize("shard", PLACEMENTS)
def test_a_unit_that_no_batch_reaches_stays_as_it_is(shard: str) -> None:
    torch.manual_seed(0)
    model, stream = Skips(), iter(batches(4))
    steps, weights = [[next(stream), next(stream)] for _ in range(2)], [[5.0, 3.0], [2.0, 4.0]]
    simulation = simulate(
        model, sgd(model), mse, steps, replace(ROWS, shard=shard, clip=0.3), weights=weights,
        units=lambda name, module: name != "",
    )  # fmt: skip
    plain = copy.deepcopy(model)
    expected = one_process(plain, steps, weights)
    torch.testing.assert_close(torch.stack(simulation.losses), torch.tensor(expected), rtol=1e-6, atol=0)
    assert len(simulation.plan.buffers) == 2 and off(simulation, plain) <= 1e-6 < off(simulation, model)
