"""Sizes that change between calls, with no word of them: the second makes one program for all, as `torch.compile`'s."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.launch import launch
from tests.toys import EAGER, batches, mse, net, same_weights, sgd

WORKER = Path(__file__).parents[1] / "workers" / "moving_sizes.py"


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def trained(loss: Any, calls: list[tuple[torch.Tensor, ...]], policy: Policy) -> tuple[list[int], float, bool]:
    """One step a call beside eager PyTorch: programs after each, the losses' largest error, whether weights agree."""
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=loss, policy=policy)
    optimizer, captures, error = sgd(plain), [], 0.0
    for batch in calls:
        found = sharded.step(*batch)
        optimizer.zero_grad()
        expected = loss(plain, *batch)
        expected.backward()
        optimizer.step()
        captures.append(sharded.captures)
        error = max(error, float((found - expected.detach()).abs()))
    return captures, error, same_weights(sharded.full_state_dict(), dict(plain.state_dict()))


def test_the_second_number_of_rows_makes_the_last_program_bit_for_bit() -> None:
    calls = [batches(1, rows)[0] for rows in (5, 5, 4, 7, 5, 64, 2, 1)]
    assert trained(mse, calls, EAGER) == ([1, 1, 2, 2, 2, 2, 2, 3], 0.0, True)  # one row is another program


def test_without_it_each_number_has_a_program() -> None:
    calls = [batches(1, rows)[0] for rows in (5, 4, 7)]
    assert trained(mse, calls, replace(EAGER, dynamic=False)) == ([1, 2, 3], 0.0, True)


def test_a_second_dim_that_changes_makes_one_more() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    sizes = ((4, 3), (5, 3), (5, 7), (8, 2))
    calls = [(torch.ones(rows, length, 6) / (rows + length),) for rows, length in sizes]
    assert trained(loss, calls, EAGER) == ([1, 2, 3, 3], 0.0, True)


def _row_by_row(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([mse(model, x[i], y[i]) for i in range(len(x))]).mean()


def _twice_if_odd(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model, x, y) * (2 if len(x) % 2 else 1)


@pytest.mark.parametrize(
    ("loss", "programs"), [(_row_by_row, [1, 2, 3, 3]), (_twice_if_odd, [1, 2, 3, 3])], ids=["count", "parity"]
)
def test_code_that_asks_for_a_size_has_a_program_for_each_answer(loss: Any, programs: list[int]) -> None:
    calls = [batches(1, rows)[0] for rows in (3, 2, 5, 2)]
    assert trained(loss, calls, EAGER) == (programs, 0.0, True)


def test_what_cannot_be_made_for_several_sizes_is_made_for_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fsdp_compiled")
    sharded = compile_sharded(build(), loss=lambda m, x, y: (mse(m, x, y), {"half": len(x) / 2}), policy=EAGER)
    halves = [sharded.value_and_grad(*batches(1, rows)[0])[0][1]["half"] for rows in (3, 2, 4, 2)]
    assert halves == [1.5, 1.0, 2.0, 1.0] and sharded.captures == 3
    assert caplog.text.count("each size has a program of its own") == 1  # it is not tried again


def test_a_size_that_is_not_the_first_tensors_has_programs_of_its_own() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mse(model, x, y) * weights.sum()

    calls = [(*batches(1)[0], torch.ones(count)) for count in (2, 3, 4)]
    assert trained(loss, calls, EAGER) == ([1, 2, 3], 0.0, True)


@pytest.mark.exhaustive  # as by Policy.dynamic, in test_dynamic_shapes
def test_compiled_by_inductor_too() -> None:
    model = net()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=mse)
    for rows in (3, 2, 9, 4):
        x, y = torch.randn(rows, 4), torch.randn(rows, 2)
        torch.testing.assert_close(sharded.value_and_grad(x, y)[0], mse(plain, x, y).detach())
    assert sharded.captures == 2


def test_on_two_ranks() -> None:
    expected = {"step": [1, 2, 2, 2, 2], "loop": ["", 2], "sizes_by_rank": [True] * 9,
                "refused": [[2.0, 1.5, 3.0], 3]}  # fmt: skip
    assert launch(WORKER, 2) == [expected, expected]
