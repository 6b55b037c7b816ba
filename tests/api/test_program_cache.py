"""How many programs are kept, what is said when one is dropped, and which parameters are said to be idle, once."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.toys import EAGER, batches, build, mse, same_weights, sgd


def test_the_least_recently_used_program_is_dropped_and_the_numbers_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=replace(EAGER, programs=2, dynamic=False))
    optimizer = sgd(plain)
    rows = [3, 4, 3, 5, 3, 4]  # 5 drops 4, since 3 was used after it; then 4 drops 5
    for count in rows:
        x, y = batches(1, rows=count)[0]
        sharded.step(x, y)
        optimizer.zero_grad()
        mse(plain, x, y).backward()
        optimizer.step()
        assert len(sharded.programs) <= 2
    assert sharded.captures == 4
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "compiling step (float32[5, 6], float32[5, 2]): 2 programs are kept" in said[0]
    assert "that of step (float32[4, 6], float32[4, 2]) was dropped" in said[0]
    assert "  step (float32[3, 6], float32[3, 2])" in said[0] and "drop_last=True" in said[0]
    assert "that of step (float32[5, 6], float32[5, 2]) was dropped (2 so far)" in said[1]
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))


def test_with_room_for_all_nothing_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=replace(EAGER, programs=3, dynamic=False))
    for count in (3, 4, 5, 3, 4, 5):
        sharded.step(*batches(1, rows=count)[0])
    assert sharded.captures == 3
    assert not [record for record in caplog.records if record.name == "fsdp_compiled"]


def test_a_program_that_cannot_be_made_drops_none() -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=replace(EAGER, programs=1))
    sharded.step(*batches(1)[0])
    with pytest.raises(ValueError, match="failed while it was traced"):
        sharded.step(torch.ones(5, 7), torch.ones(5, 2))
    sharded.step(*batches(1)[0])
    assert sharded.captures == 1


@pytest.mark.parametrize("programs", [0, -1, 2.0, True, None])
def test_a_bound_that_is_none_is_refused(programs: Any) -> None:
    with pytest.raises(ValueError, match=r"Policy\.programs is .*; expected a whole number, 1 or more"):
        Policy(programs=programs)


class Branches(nn.Module):
    """A different part is left out on request."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *, second: bool = False) -> torch.Tensor:
        return self.used(x) + (self.second(x) if second else self.first(x))


def test_an_idle_parameter_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, second: bool = False) -> torch.Tensor:
        return (model(x, second=second) - y).square().mean()

    model = Branches()
    sharded = compile_sharded(model, sgd(model), loss=loss, policy=EAGER)
    sharded.step(*batches(1)[0])
    sharded.step(*batches(1, rows=4)[0])
    sharded.value_and_grad(*batches(1)[0])
    sharded.step(*batches(1)[0], second=True)
    said = [record.getMessage() for record in caplog.records if "does not reach" in record.getMessage()]
    assert said == [
        "the loss does not reach second.weight, second.bias: no gradient, and no update, for them",
        "the loss does not reach first.weight, first.bias: no gradient, and no update, for them",
    ]
