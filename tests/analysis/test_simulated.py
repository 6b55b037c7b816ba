"""What is simulated is what runs: rank 0's program on real ranks, at any number of ranks, and times that make sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from fsdp_compiled import simulate
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.plan.hardware import gpus
from fsdp_compiled.runtime.simulate import Estimate
from tests import models
from tests.chosen import examples
from tests.launch import results_of
from tests.workers.simulated import CASES, batch, model

results = results_of(Path(__file__).parents[1] / "workers" / "simulated.py", 2)
LANES = ("network", "replicate", "tp", "from the host", "to the host")
H100 = gpus("h100", node=2)


@pytest.mark.parametrize("case", CASES)
def test_rank_0_of_2_simulated_is_the_real_one_text_for_text(case: str, results: Any) -> None:
    found = simulate(model, next_byte_loss, batch(), 2, "cpu", CASES[case])
    real = results[case]
    assert found.program.text() == real["text"] and len(real["text"]) > 10_000
    assert str(found.program) == real["program"] and "all_gather" in real["program"]
    assert str(found.plan) == real["plan"] and found.memory.peak.nbytes == real["peak"] > 2**18


def test_a_ranks_program_does_not_grow_with_the_number_of_ranks() -> None:
    """Nor does the time to make it: rank 0 of 131,072 takes what rank 0 of 8 does."""
    words = torch.zeros(1, 16, dtype=torch.int64)
    few, many = (
        simulate(lambda: GPT(GPTConfig(3, 32, 2, 16)), next_byte_loss, (words, words), ranks, "h100")
        for ranks in (8, 131_072)
    )
    assert few.plan.shard == 8 and many.plan.shard == 131_072
    assert nodes_of(many) == pytest.approx(nodes_of(few), rel=0.02) and nodes_of(few) > 200
    assert len(many.program.text()) == pytest.approx(len(few.program.text()), rel=0.02)


def nodes_of(one: Estimate) -> int:
    return len(one.program.graph.nodes)


@settings(
    max_examples=examples(3, 12),
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(models.recipes())
def test_times_of_generated_models_are_bounded_and_monotone(recipe: models.Recipe) -> None:
    """Waiting is at most what travels and what the host launches; more rows and a slower network take longer."""
    recipe = replace(recipe, width=64 * recipe.width, hidden=64 * recipe.hidden)
    mesh = {"replicate": recipe.replicate, "shard": recipe.shard}
    words, targets = models.batches(recipe, 1)[0][0]
    fast = H100
    slower = replace(fast, network=fast.network / 20, inner=(fast.inner or fast.network) / 20)

    def made(times: int) -> Estimate:
        rows = words.repeat(times), targets.repeat(times)
        return simulate(
            lambda: models.build(recipe)[0], models.loss, rows, mesh, fast, recipe.policy, units=models.units(recipe)
        )

    one, more = made(1), made(64)
    policy = replace(one.plan.policy, cuda_graph=False)
    launched = replace(one, plan=replace(one.plan, policy=policy)).on(fast)
    for found in (one, more, launched, one.on(slower), launched.on(slower)):
        kernels = 0.0 if found.plan.graphed else nodes_of(found) * fast.launch
        assert 0 <= found.exposed <= sum(map(found.busy, LANES)) + kernels + 1e-9
    assert one.seconds <= more.seconds and one.seconds <= launched.seconds
    for found in (one, more, launched):
        slow = found.on(slower)
        assert found.seconds <= slow.seconds and sum(map(found.busy, LANES)) < sum(map(slow.busy, LANES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_of_half_precision_are_simulated_for_a_gpu(dtype: torch.dtype) -> None:
    """PyTorch without a GPU cannot copy between fake GPU tensors, which rounding an update to bfloat16 does."""

    def model() -> torch.nn.Module:
        return torch.nn.Linear(64, 64, bias=False).to(dtype)

    found = simulate(model, lambda model, x: model(x).square().mean(), (torch.ones(4, 64, dtype=dtype),), 8, "h100")
    assert found.memory.persistent.optimizer == 2 * 64 * 64 // 8 * dtype.itemsize + 4  # the step, of the group
