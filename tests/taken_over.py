"""A model before and after compile_sharded took it over, for tests of what can be done with it then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.live_parameters import Net, X, loss

EAGER = Policy(lower="eager")


@dataclass
class Case:
    """A model before and after it was taken over, and the same untouched."""

    model: Net
    optimizer: torch.optim.Optimizer
    sharded: Sharded
    eager: Net
    held: list[nn.Parameter]  # the user's own list, from before

    @property
    def weight(self) -> nn.Parameter:
        return self.held[1]  # of layers.0


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def taken() -> Case:
    model, optimizer = build()
    held = list(model.parameters())
    held = [held[0], model.layers[0].weight, *held[1:]]  # type: ignore[list-item]
    return Case(model, optimizer, compile_sharded(model, optimizer, loss=loss, policy=EAGER), build()[0], held)


def trained_as_eager(case: Case, steps: int = 3) -> None:
    model, optimizer = build()
    for _ in range(steps):
        optimizer.zero_grad()
        expected = loss(model, X)
        expected.backward()
        optimizer.step()
        assert torch.equal(case.sharded.step(X), expected)
    assert same(case.sharded.full_state_dict(), model.state_dict())
    assert not same(model.state_dict(), case.eager.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
