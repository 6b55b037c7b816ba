"""What resumes are known to lose elsewhere: step counts of a run that has made none, odd rates, an hour."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import whole

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
Make = Callable[[nn.Module], optim.Optimizer]


def build(seed: int, make: Make, layers: int = 2) -> Sharded:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    return compile_sharded(
        model, make(model), loss=lambda m, x: m(x).square().mean(), policy=Policy(lower="eager", shard="ddp")
    )


def equal(one: Sharded, other: Sharded) -> bool:
    weights = other.full_state_dict()
    return all(torch.equal(value, weights[name]) for name, value in one.full_state_dict().items())


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01)


def test_a_run_that_has_made_no_step_loads_and_goes_on(tmp_path: Path) -> None:
    """ "Missing key optimizer.state.0.step", in accelerate and others: there the state begins with the first step."""
    one = build(0, adamw)
    one.save(tmp_path / "none", wait=True)
    one.step(X)
    one.save(tmp_path / "one", wait=True)
    fresh = build(1, adamw)
    assert fresh.load(tmp_path / "one") == 1 and equal(fresh, one)
    assert fresh.load(tmp_path / "none") == 0 and not equal(fresh, one), "back to where nothing was trained"
    fresh.step(X)
    assert equal(fresh, one)
    assert fresh.full_optimizer_state_dict()["state"][0]["step"] == 1


def with_numpy(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=np.float64(0.01), weight_decay=np.float32(0.25))  # type: ignore[arg-type]


def test_rates_that_are_no_floats_come_back(tmp_path: Path) -> None:
    one = build(0, with_numpy)
    one.step(X)
    one.save(tmp_path, wait=True)
    other = build(1, with_numpy)
    other.load(tmp_path)
    assert equal(one, other) and torch.equal(one.step(X), other.step(X)) and equal(one, other)


def test_options_of_numpy_are_compared_by_their_values(tmp_path: Path) -> None:
    build(0, with_numpy).save(tmp_path, wait=True)
    other = build(0, lambda m: optim.AdamW(m.parameters(), lr=0.01, weight_decay=np.float32(0.5)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\['weight_decay'\] is .*0.5.* here, and 0.25 in the checkpoint"):
        other.load(tmp_path)


def test_a_whole_state_of_the_optimizer_takes_a_collective_a_buffer_and_not_a_parameter() -> None:
    """A gather for each of many parameters is what took accelerate an hour."""
    counts = []
    for layers in (2, 12):
        sharded = build(0, adamw, layers)
        trained = sharded._trained("a test")
        cut = replace(trained.plan, policy=Policy(shard="zero3"))  # as on several ranks; here no collective is made
        work = whole.optimizer_state_dict(replace(trained, plan=cut), Mesh(torch.device("cpu")))
        counts.append((sum(1 for _ in work), 2 * len(sharded.plan.buffers)))
    assert all(found == expected for found, expected in counts), counts


def test_folders_that_are_named_otherwise_are_no_checkpoints(tmp_path: Path) -> None:
    one = build(0, adamw)
    place = one.save(tmp_path, step=5, wait=True).result()
    shutil.copytree(place, tmp_path / "step-0009")
    shutil.copytree(place, tmp_path / "step-٤٢")
    assert build(1, adamw).load(tmp_path) == 5
