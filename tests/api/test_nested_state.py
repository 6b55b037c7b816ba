"""Optimizer state in dictionaries, lists and tuples of ``state[parameter]``: sharded, and brought along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim.optimizer_copy import named_leaves
from tests.toys import squares

EAGER = Policy(lower="eager", shard="zero1")
BETAS = (0.0, 0.9, 0.99)


class Nested(optim.Optimizer):
    """Momenta in a dictionary, a tuple that is bound anew, and a count in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momenta"] = {beta: torch.zeros_like(p) for beta in BETAS}
                    state["pair"] = (torch.zeros_like(p), {"square": torch.zeros_like(p)})
                    state["count"] = [0]
                state["count"][0] += 1
                for beta, momentum in state["momenta"].items():
                    momentum.mul_(beta).add_(p.grad)
                    p.add_(momentum, alpha=-group["lr"] / len(BETAS))
                mean, inner = state["pair"]
                state["pair"] = (mean.lerp(p.grad, 0.1), {"square": inner["square"] + p.grad.square()})
                p.addcdiv_(state["pair"][0], inner["square"].sqrt() + 1, value=-group["lr"] / state["count"][0])


class Grows(Nested):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("norms", []).append(p.grad.norm())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _eagerly(model: nn.Module, optimizer: optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        squares(model, batch).backward()
        optimizer.step()


@pytest.mark.parametrize("before", [0, 3])
def test_state_in_containers_is_sharded_and_brought_along(before: int) -> None:
    """``before``: steps that the optimizer has made when it is taken over."""
    batches = [torch.randn(4, 6) for _ in range(7)]
    eager, model = _model(), _model()
    theirs, mine = Nested(eager.parameters()), Nested(model.parameters())
    _eagerly(model, mine, batches[:before])
    sharded = compile_sharded(model, mine, loss=squares, policy=EAGER)
    for batch in batches[before:]:
        sharded.step(batch)
    _eagerly(eager, theirs, batches)
    found = sharded.full_state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    names = {name.rpartition(".")[2] for name in sharded.state.optimizer}
    assert names == {"momenta_0_0", "momenta_0_9", "momenta_0_99", "pair_0", "pair_1_square", "count_0"}
    assert sharded.state.optimizer["group 0.count_0"] == len(batches)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.NAdam])
def test_a_group_of_single_numbers_brings_its_state_along(kind: type[optim.Optimizer]) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters()}, {"params": [model.gain]}]  # type: ignore[index]

    batches = [torch.randn(4, 6) for _ in range(5)]
    eager, model = _model(), _model()
    for one in (eager, model):
        one.gain = nn.Parameter(torch.tensor(0.7))
    theirs, mine = (kind(groups(one), lr=0.1) for one in (eager, model))  # type: ignore[call-arg]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * model.gain).square().mean()  # type: ignore[operator, no-any-return]

    for index, batch in enumerate(batches):
        for one, optimizer in ((eager, theirs), (model, mine))[: 2 if index < 3 else 1]:
            optimizer.zero_grad()
            loss(one, batch).backward()
            optimizer.step()
    sharded = compile_sharded(model, mine, loss=loss, policy=EAGER)
    for batch in batches[3:]:
        sharded.step(batch)
    torch.testing.assert_close(sharded.full_state_dict()["gain"], eager.gain.detach())


def test_a_container_that_grows_is_refused() -> None:
    model = _model()
    with pytest.raises(ValueError, match="Grows is not supported"):
        compile_sharded(model, Grows(model.parameters()), loss=squares, policy=EAGER)


def test_what_is_inside_has_names_of_its_own() -> None:
    assert named_leaves("m", {1: "a", -1: "b", "x": ["c", ("d",)]}) == {
        "m_1": "a", "m_1_": "b", "m_x_0": "c", "m_x_1_0": "d",
    }  # fmt: skip
    assert named_leaves("m", 3) == {"m": 3}
