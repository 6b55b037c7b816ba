"""A class that gets a name of its own which it inherited when the model was traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture.traced_functions import Methods


class Base:
    factor = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Options(Base):
    pass


class BaseBlock(nn.Module):
    power = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.options, self.kind = nn.Linear(3, 3), Options(), Options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.options.scaled(self.linear(x)) ** self.power + self.kind.factor


class Block(BaseBlock):
    pass


def losses(change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, int]:
    """By eager PyTorch and here, before the change and after it; and how many traces there were."""
    torch.manual_seed(0)
    model, eager = (nn.Sequential(Block(), Block()) for _ in range(2))
    eager.load_state_dict(model.state_dict())
    sharded = compile_sharded(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        loss=lambda model, x: model(x).square().mean(),
        policy=Policy(lower="eager"),
    )
    found: tuple[list[float], list[float]] = [], []
    x = torch.randn(2, 3)
    for step in range(2):
        if step == 1:
            change(monkeypatch)
        found[0].append(eager(x).square().mean().item())
        found[1].append(float(sharded.step(x)))
    return *found, sharded.captures


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "attribute": lambda patch: patch.setattr(Options, "factor", 3.0),
    "attribute of a module's class": lambda patch: patch.setattr(Block, "power", 3),
    "method": lambda patch: patch.setattr(Options, "scaled", lambda self, x: x * 5),
    "forward": lambda patch: patch.setattr(Block, "forward", lambda self, x: self.linear(x)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours, captures = losses(CHANGES[change], monkeypatch)
    assert eager[1] != eager[0] and ours == eager and captures == 2


def test_control_where_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Methods, "_shadowed", lambda _: None)
    eager, ours, captures = losses(CHANGES["attribute of a module's class"], monkeypatch)
    assert ours[0] == eager[0] and ours[1] != eager[1] and captures == 1


def test_other_names_compile_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nobody inherited; and what `copy.deepcopy` leaves on classes."""

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Options, "more", 1, raising=False)
        for kind in (Base, Options, BaseBlock, Block):
            copy.deepcopy(kind())

    eager, ours, captures = losses(change, monkeypatch)
    assert ours == eager and captures == 1
