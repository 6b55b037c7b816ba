"""Code that models bring along, traced whole and trained as plain PyTorch trains it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn.utils import parametrizations

from fsdp_compiled import Policy, compile_sharded
from tests.test_api import same_weights


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


class Custom(nn.Module):
    """An autograd.Function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Square.apply(self.first(x)))


class Autocast(Custom):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(self.first(x)).float()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x[:, None].expand(-1, 5, -1))[0][:, -1])


class Normalised(nn.Module):
    """Weights computed from parameters, one of them with buffers that forward updates and does not read first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(8, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Average(nn.Module):
    """A buffer updated with a value that a gradient flows through: the loss's gradient is not changed by that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


class Literals(nn.Module):
    """Tensors written out in forward, and one that hangs on the module without being a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 3), torch.full((3,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale + torch.tensor([0.5, 0.25, 0.125])
        return torch.where(y > 0, y, torch.tensor(-0.1))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    slopes = vmap(grad(lambda row: model(row[None]).sum()))(x)
    return mse(model, x, y) + slopes.square().mean()


def tangent(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output, slope = jvp(model, (x,), (torch.ones_like(x),))
    return F.mse_loss(output, y) + slope.square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "autograd.Function": (Custom, mse),
    "autocast": (Autocast, mse),
    "LSTM": (Recurrent, mse),
    "weight and spectral norm": (Normalised, mse),
    "running average": (Average, mse),
    "literal tensors": (Literals, mse),
    "vmap(grad) in the loss": (smooth, penalty),
    "jvp in the loss": (smooth, tangent),
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_plain_pytorch_does(case: str) -> None:
    make, loss = CASES[case]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=Policy(lower="eager")
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        x, y = torch.randn(5, 8), torch.randn(5, 3)
        found = sharded.step(x, y)
        optimizer.zero_grad()
        expected = loss(plain, x, y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
    weights = sharded.full_state_dict()
    for name, value in plain.state_dict().items():
        assert (weights[name] - value).norm() <= 1e-6 * value.norm() + 1e-8
    assert not same_weights(weights, start)


def test_literals_of_one_program_do_not_leak_into_another() -> None:
    class Moods(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + (torch.tensor(1.0) if self.training else torch.tensor(5.0))

    model = Moods()
    sharded = compile_sharded(model, policy=Policy(lower="eager"))
    x = torch.randn(2, 8)
    training = sharded(x)
    model.eval()
    torch.testing.assert_close(sharded(x) - training, torch.full((2, 3), 4.0))


def test_an_operator_with_a_body_of_its_own_is_refused_with_a_cure() -> None:
    def branches(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        return torch.cond(output.sum() > 0, lambda z: z.square().mean(), lambda z: z.abs().mean(), (output,))

    sharded = compile_sharded(smooth(), loss=branches, policy=Policy(lower="eager"))
    with pytest.raises(ValueError, match=r"higher-order operator.*not supported yet"):
        sharded.value_and_grad(torch.randn(5, 8), torch.randn(5, 3))
