"""`compile_optimizer`: clipping and update of a loop of the user's own as one program, beside the optimizer itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from fsdp_compiled import compile_optimizer, fully_shard
from tests.launch import launch
from tests.toys import build, mse

WORKER = Path(__file__).parent / "workers" / "compile_optimizer.py"
NONE = "a parameter has no gradient, or one that is not cut as the parameter is"
APART = "parameters of one group have made different steps"
# By case, which of its steps the program makes, and why not.
PROGRAM = {
    "groups": [True] * 4,
    "cycle": [True] * 6,
    "momentum": [True] * 5,
    "saved": [True] * 5,  # the other one is not compiled
    "missing": [True, NONE, APART, APART],
    "scaler": [True] * 3,  # and none where gradients overflow
    "written": [True, True, True, APART, True],
    "hybrid": [True] * 3,
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(WORKER, 2)


@pytest.mark.parametrize("case", PROGRAM)
def test_it_leaves_what_fsdp2_and_the_optimizer_leave(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        said, ran = rank[case]
        assert not said
        assert ran == PROGRAM[case]


def test_another_rate_is_told_apart(found: list[dict[str, Any]]) -> None:
    assert all("off by" in rank["broken"][0] for rank in found)


def test_clipping_is_that_of_clip_grad_norm(found: list[dict[str, Any]]) -> None:
    for rank in found:
        off, ran = rank["clipped"]
        assert 0 <= off < 1e-6
        assert ran == [True, True, NONE, True]


def test_inductors_update_is_that_of_clip_grad_norm_and_the_optimizer(found: list[dict[str, Any]]) -> None:
    for rank in found:
        off, ran = rank["inductor"]
        assert 0 <= off < 1e-6
        assert ran == [True, True]


def test_a_graph_on_two_ranks_leaves_the_same(found: list[dict[str, Any]]) -> None:
    for rank in found:
        off, captured = rank["graphed"]
        assert 0 <= off < 1e-6
        assert captured == [1, 4]


def test_what_is_not_supported_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    expected = ("fully_shard was not called on", "none of those that fully_shard sharded", "LBFGS is not supported",
                "max_norm is 0.0", "add_param_group is not supported", "cannot be copied",
                "modified by an inplace operation")  # fmt: skip
    for rank in found:
        for said, wanted in zip(rank["refused"], expected, strict=True):
            assert wanted in said


def test_state_is_flat_and_shown_by_parameter(found: list[dict[str, Any]]) -> None:
    for rank in found:
        shown, storages, parameters = rank["views"]
        assert shown and storages < parameters


def test_gradients_and_state_can_be_copied() -> None:
    model = fully_shard(build())
    optimizer = compile_optimizer(model, torch.optim.AdamW(model.parameters()))
    mse(model, torch.randn(5, 6), torch.randn(5, 2)).backward()
    optimizer.step()
    for one in model.parameters():
        assert torch.equal(copy.deepcopy(one.grad).full_tensor(), one.grad.full_tensor())
    state = copy.deepcopy(optimizer.state_dict())["state"]
    for place, one in enumerate(model.parameters()):
        assert torch.equal(state[place]["exp_avg"].full_tensor(), optimizer.state[one]["exp_avg"].full_tensor())


def test_parameters_that_took_others_places_before_the_first_call() -> None:
    with torch.device("meta"):
        model = fully_shard(build())
    plain = build()
    wholes = plain.state_dict()
    model.load_state_dict(
        {
            name: distribute_tensor(wholes[name], one.device_mesh, one.placements)
            for name, one in model.state_dict().items()
        },
        assign=True,
    )
    x, y = torch.randn(5, 6), torch.randn(5, 2)
    optimizers = [
        compile_optimizer(model, torch.optim.AdamW(model.parameters())),
        torch.optim.AdamW(plain.parameters()),
    ]
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        mse(one, x, y).backward()
        optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), other)
