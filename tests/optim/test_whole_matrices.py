"""Optimizers that need whole matrices: each is updated by its owner, as eager PyTorch does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from tests.launch import launch
from tests.matrices import Matrices, batches, loss
from tests.parts import parts
from tests.whole_optimizers import Counting, Own

EAGER = Policy(lower="eager")


def _beside_eager(
    make: Callable[[nn.Module], optim.Optimizer], policy: Policy = EAGER, steps: int = 5, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """Weights by eager PyTorch and here, of the same steps with changing rates."""
    sides = []
    for ours in (False, True):
        model = Matrices(**options)
        optimizer = make(model)
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.3, 2.0)[step % 3])
        sharded: Any = compile_sharded(model, optimizer, loss=loss, policy=policy) if ours else None
        for batch in batches(steps):
            if ours:
                sharded.step(batch)
            else:
                optimizer.zero_grad()
                loss(model, batch).backward()
                if policy.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), policy.clip)
                optimizer.step()
            schedule.step()
        sides.append(sharded.full_state_dict() if ours else model.state_dict())
    return sides[0], sides[1], sharded


def _muon(model: nn.Module) -> optim.Optimizer:
    return optim.Muon(model.parameters(), lr=0.02, weight_decay=0.2)


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor])
def test_as_in_eager_pytorch(kind: Any) -> None:
    theirs, mine, sharded = _beside_eager(lambda model: kind(model.parameters(), lr=0.02, weight_decay=0.2))
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    assert sharded.captures == 1
    other, _, _ = _beside_eager(lambda model: kind(model.parameters(), lr=0.021, weight_decay=0.2))  # control
    assert not all(torch.equal(mine[name], value) for name, value in other.items())


def test_clipping_and_inductor() -> None:
    theirs, mine, _ = _beside_eager(_muon, Policy(lower="inductor", clip=0.01), steps=3)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() != 2], "lr": 0.01}]


class Mixed(Own):
    """Orthogonal for matrices, by the sign for the rest, chosen by an option of the group."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        optim.Optimizer.__init__(self, [{**groups[0], "whole": True}, {**groups[1], "whole": False}], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.3)
                p.sub_(mean / mean.norm() if group["whole"] else mean.sign(), alpha=group["lr"])


def test_groups_that_can_be_traced_stay_in_the_program() -> None:
    theirs, mine, sharded = _beside_eager(lambda model: Mixed(_groups(model)), bias=True)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-6, atol=1e-7)
    keys = set(sharded.state.optimizer)
    assert "layers.0.up.weight.mean" in keys and "layers.0.up.bias.mean" not in keys
    assert any(key.endswith("#1.mean") for key in keys)  # of a buffer


def test_what_cannot_be_done_is_refused() -> None:
    model = Matrices()
    sharded = compile_sharded(model, _muon(model), loss=loss, policy=EAGER)
    batch = next(iter(batches(1)))
    with pytest.raises(ValueError, match="apply with Muon, which runs as it is, on whole parameters"):
        sharded.apply(sharded.state, batch)
    sharded.step(batch)


def test_a_frozen_and_an_idle_matrix_stay_as_they_are() -> None:
    model = Matrices(idle=True)
    model.layers[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = compile_sharded(model, _muon(model), loss=loss, policy=EAGER)
    for batch in batches(2):
        sharded.step(batch)
    after = sharded.full_state_dict()
    same = {name for name, value in before.items() if torch.equal(after[name], value)}
    assert same == {"idle", "layers.1.up.weight"}


def test_a_step_that_overflows_does_not_run() -> None:
    model = Matrices()
    sharded = compile_sharded(model, _muon(model), loss=loss, policy=Policy(lower="eager", loss_scale="dynamic"))
    before = sharded.full_state_dict()
    sharded.step(torch.full((6, 6), float("inf")))
    assert sharded.overflows == 1 and not sharded.state.optimizer
    assert all(torch.equal(value, before[name]) for name, value in sharded.full_state_dict().items())


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.exhaustive) for world in (3, 4))])
def test_on_ranks(world: int, tmp_path: Path) -> None:
    """Every placement, accumulation, state that is brought along, a failing owner: see the worker.

    What was saved there goes on here, on one rank."""
    found = launch(Path(__file__).parents[1] / "workers" / "whole_matrices.py", world, str(tmp_path))
    assert not any(found.values()), json.dumps(found, indent=1)
    assert len(found) >= (2 if world == 3 else 6)
    model = Matrices(bias=True)
    sharded = compile_sharded(model, _plain_pair(model), loss=loss, policy=EAGER)
    assert sharded.load(tmp_path) == 2
    for batch in list(batches(4))[2:]:
        sharded.step(batch)
    mine = sharded.full_state_dict()
    for name, value in torch.load(tmp_path / "weights.pt").items():  # sums of gradients in another order
        torch.testing.assert_close(mine[name], value, rtol=0, atol=2e-3)


def _plain_pair(model: nn.Module) -> list[optim.Optimizer]:
    first, second = _groups(model)
    return [optim.Muon(first["params"], lr=0.02), optim.AdamW(second["params"], lr=0.01)]


def _pair(model: nn.Module) -> list[optim.Optimizer]:
    first, second = _groups(model)
    return [
        optim.Muon(first["params"], lr=0.02, weight_decay=0.2),
        optim.AdamW(second["params"], lr=0.01, weight_decay=0.3),
    ]


def _pair_steps(model: nn.Module, optimizers: list[optim.Optimizer], step: Callable[[torch.Tensor], Any]) -> None:
    """With a schedule for each, and an option that changes."""
    schedules = [optim.lr_scheduler.LambdaLR(one, lambda count: 1 / (1 + count)) for one in optimizers]
    for index, batch in enumerate(batches(4)):
        for one in optimizers:
            one.param_groups[0]["weight_decay"] = 0.1 + 0.1 * (index > 2)
        step(batch)
        for schedule in schedules:
            schedule.step()


def test_muon_for_matrices_and_adamw_for_the_rest() -> None:
    eager, model = Matrices(bias=True), Matrices(bias=True)
    theirs, mine = _pair(eager), _pair(model)

    def eagerly(batch: torch.Tensor) -> None:
        for one in theirs:
            one.zero_grad()
        loss(eager, batch).backward()
        for one in theirs:
            one.step()

    with parts():
        sharded = compile_sharded(model, mine, loss=loss, policy=EAGER)
    _pair_steps(eager, theirs, eagerly)
    _pair_steps(model, mine, sharded.step)
    found = sharded.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in eager.state_dict().items())
    assert "updated whole: 7 parameters" in str(sharded.plan)
    for one in mine:
        with pytest.raises(RuntimeError, match="was taken over by compile_sharded"):
            one.step()
    mine[0].momentum = 3.0  # type: ignore[attr-defined]
    assert [one.changed() for one in sharded._updates] == [["optimizer.momentum"]]


def test_lists_that_are_none() -> None:
    model = Matrices()
    matrices = list(model.parameters())
    with pytest.raises(ValueError, match="AdamW and SGD both hold a parameter of shape"):
        compile_sharded(model, [optim.AdamW(matrices), optim.SGD(matrices[:1])], loss=loss, policy=EAGER)
    with pytest.raises(ValueError, match=r"optimizer is a list of \[int\]; expected torch.optim.Optimizers"):
        compile_sharded(model, [3], loss=loss, policy=EAGER)  # type: ignore[list-item]


@pytest.mark.parametrize("make", [_pair, lambda model: Counting(model.parameters())], ids=["pair", "Counting"])
def test_a_checkpoint_goes_on_bit_for_bit(make: Any, tmp_path: Path) -> None:
    data = list(batches(6))
    weights = []
    for kept in (None, 3):
        model = Matrices(bias=True)
        sharded = compile_sharded(model, make(model), loss=loss, policy=EAGER)
        for index, batch in enumerate(data):
            if index == kept:
                sharded.save(tmp_path, wait=True)
                model = Matrices(bias=True)
                sharded = compile_sharded(model, make(model), loss=loss, policy=EAGER)
                assert sharded.load(tmp_path) == 3
            sharded.step(batch)
        weights.append(sharded.full_state_dict())
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    other = Matrices(bias=True)
    with pytest.raises(ValueError, match="the optimizer is torch"):
        compile_sharded(other, optim.AdamW(other.parameters()), loss=loss, policy=EAGER).load(tmp_path)
