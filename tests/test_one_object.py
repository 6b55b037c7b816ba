"""An object that the model and a global lead to: another one in either place is seen, as in eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture import one_object
from fsdp_compiled.torch_private.dynamo import variable_builder


class Options:
    def __init__(self, factor: float) -> None:
        self.factor = factor


OPTIONS = Options(2.0)
TABLE = {"factor": 2.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.options, self.table = OPTIONS, TABLE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * OPTIONS.factor * TABLE["factor"]
        return self.second(y) * self.options.factor * self.table["factor"]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def losses(change: Any) -> tuple[list[float], list[float], int]:
    """By eager PyTorch and here, of steps between which something is changed; how often a step was captured."""
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    eager.options, eager.table = OPTIONS, TABLE
    optimizer = torch.optim.SGD(eager.parameters(), 0.01)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.01), loss=loss, policy=Policy(lower="eager"))
    found: tuple[list[float], list[float]] = [], []
    x = torch.randn(2, 3)
    for step in range(4):
        if step == 2:
            change(model, eager)
        value = loss(eager, x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found[0].append(value.item())
        found[1].append(float(sharded.step(x)))
    return *found, sharded.captures


def _other_options(*models: Any) -> None:
    for model, options in zip(models, [Options(3.0)] * 2, strict=True):
        model.options = options


def _other_table(*models: Any) -> None:
    for model in models:
        model.table = {"factor": 3.0}


@pytest.mark.parametrize("change", [_other_options, _other_table])
def test_another_object_in_its_place_is_seen(change: Any) -> None:
    eager, ours, captures = losses(change)
    assert ours == eager and captures == 2


def test_the_same_object_is_captured_once() -> None:
    eager, ours, captures = losses(lambda *models: None)
    assert ours == eager and captures == 1


def test_control_without_the_question_it_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_object, "GuardBuilder", type("None", (), {"ID_MATCH": None}))
    eager, ours, captures = losses(_other_options)
    assert ours[:2] == eager[:2] and ours[2:] != eager[2:] and captures == 1


def test_dynamo_is_left_as_it_was() -> None:
    before = variable_builder.make_dupe_guard
    with one_object.asked_again():
        assert variable_builder.make_dupe_guard is not before
    assert variable_builder.make_dupe_guard is before
