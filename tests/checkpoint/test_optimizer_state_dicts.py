"""``optimizer.state_dict()`` goes both ways, with all that the optimizer counts, and one that has made no step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded

X = torch.linspace(-1, 1, 8).view(2, 4)


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter)
                state["sum"].add_(parameter.grad)
                parameter.add_(state["sum"], alpha=-group["lr"] / group["step"])


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a count in the group": (Counting, {}),
    "a first step without dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "a count of each parameter": (torch.optim.AdamW, {}),
}


def plain(kind: Any, options: dict[str, Any], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("what", KINDS)
def test_both_ways_and_back_to_the_beginning(what: str) -> None:
    kind, options = KINDS[what]
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    sharded = compile_sharded(
        model,
        kind(model.parameters(), lr=0.1, **options),
        loss=lambda m, x: m(x).square().mean(),
        policy=Policy(lower="eager"),
    )
    for steps in (3, 0):  # what it had is forgotten
        reference, optimizer = plain(kind, options, steps)
        sharded.load_full_state_dict(reference.state_dict())
        sharded.load_full_optimizer_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(reference, optimizer, 2)
        losses = [sharded.step(X) for _ in range(2)]
        assert torch.equal(sharded.full_state_dict()["weight"], reference.weight) and losses[0] != losses[1]
        assert not torch.equal(reference.weight, plain(kind, options, 5 - steps)[0].weight)  # the control
    found, expected = sharded.full_optimizer_state_dict(), optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, kept in expected["state"].items():
        assert found["state"][index].keys() == kept.keys()
        assert all(torch.equal(found["state"][index][name], value) for name, value in kept.items())
