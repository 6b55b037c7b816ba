"""Batches with odd strides or bits, and empty ones: eager PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.modes import EAGER, pair
from tests.toys import squares


def follow(policy: Policy, batches: list[torch.Tensor], loss: Callable[..., torch.Tensor] = squares) -> Sharded:
    """Steps on these batches, each with eager's loss and weights."""
    plain, optimizer, sharded = pair(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), policy, loss)
    for x in batches:
        expected = loss(plain, x)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(sharded.step(x), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    found = sharded.full_state_dict()
    torch.testing.assert_close(dict(plain.state_dict()), found, rtol=1e-5, atol=1e-6, equal_nan=True)
    return sharded


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_a_batch_with_the_negative_or_conjugate_bit(lower: Any) -> None:
    """It is what it stands for, in the program of an ordinary one."""
    z = torch.randn(6, 8, dtype=torch.complex64)
    negative = z.conj().imag
    assert negative.is_neg()
    sharded = follow(Policy(lower=lower), [negative, negative.clone().as_strided((6, 8), (8, 1)), z.imag])
    assert sharded.captures == 2  # the last one's strides are others
    wide = compile_sharded(
        nn.Linear(8, 4), loss=lambda m, z: m(z.imag).mean() + z.real.mean(), policy=Policy(lower=lower)
    )
    assert torch.equal(wide.value_and_grad(z.conj())[0], wide.value_and_grad(z.conj().resolve_conj())[0])
    assert not torch.equal(wide.value_and_grad(z)[0], wide.value_and_grad(z.conj())[0])
    assert wide.captures == 1


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rows: torch.randn(8, rows).t(), id="transposed"),
        pytest.param(lambda rows: torch.randn(rows, 16)[:, ::2], id="every second column"),
        pytest.param(lambda rows: torch.randn(2 * rows, 8)[::2], id="every second row", marks=pytest.mark.exhaustive),
        pytest.param(lambda rows: torch.randn(1, 8).expand(rows, 8), id="one row"),
        pytest.param(lambda rows: torch.randn(rows, 1).expand(rows, 8), id="one column", marks=pytest.mark.exhaustive),
        pytest.param(lambda rows: torch.randn(rows, 3, 8).transpose(0, 1), id="a dim exchanged"),
        pytest.param(lambda rows: torch.randn(rows, 20)[:, 3:11], id="a slice", marks=pytest.mark.exhaustive),
    ],
)
def test_a_batch_with_odd_strides_whose_size_moves(make: Callable[[int], torch.Tensor]) -> None:
    sharded = follow(Policy(lower="eager", dynamic=True), [make(5), make(7), make(9)])
    assert sharded.captures <= 3


LOSSES = {
    "mean": squares,
    "mse": lambda m, x: F.mse_loss(m(x), x[..., :4]),
    "smooth": lambda m, x: F.smooth_l1_loss(m(x), x[..., :4]),
    "huber": lambda m, x: F.huber_loss(m(x), x[..., :4]),
    "sum": lambda m, x: m(x).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_batch(loss: str, tmp_path: Any) -> None:
    """Eager's numbers, NaN for a mean; and what describes the program can describe it."""
    batches = [torch.randn(3, 8), torch.randn(0, 8)] if loss == "sum" else [torch.randn(0, 8)]
    sharded = follow(EAGER, batches, LOSSES[loss])
    assert sharded.memory.text() and sharded.dump(tmp_path)
