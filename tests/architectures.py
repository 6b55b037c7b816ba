"""Models that bring along more than layers: code of their own, operators that are hard to trace, losses with gradients.

Each of ``CASES`` maps ``float32[5, 8]`` to ``float32[5, 3]`` and comes with its loss.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import grad, jvp, vmap
from torch.nn.utils import parametrizations

from tests.toys import mse

logger = logging.getLogger("a model")


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


class Replaced(nn.Module):
    """A buffer, and a plain attribute, that forward replaces instead of writing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(8, 3), torch.zeros(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        y = y - self.mean + 0.1 * self.memory
        self.memory = y.detach().mean(0)
        return y


class Talkative(nn.Module):
    """Prints, warns, logs; leaves a loss and features on the module, and asks what its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.first.register_forward_hook(lambda module, inputs, output: setattr(module, "output", output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("input", x.shape, x.mean())
        warnings.warn("an old name", stacklevel=2)
        logger.warning("%s", x)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("never")
        y = self.second(torch.tanh(self.first(x)))
        self.extra = y.square().mean()
        return y if isinstance(self.first.weight, nn.Parameter) else -y


def talkative(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model, x, y) + 0.1 * model.extra + 0.1 * model.first.output.square().mean()


class Selected(nn.Module):
    """Rows chosen by their values: sizes that are not known when the code is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Solved(nn.Module):
    """Operators that check their result, and one whose gradient is laid out otherwise than its fake says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        inverse = torch.linalg.inv(y.mT @ y + torch.eye(8))
        gates = F.softplus(self.gate(x[None]).mT).mT[0]
        return (x @ inverse)[:, :3] * gates + torch.cumsum(gates.mT, -1).mT


def wrapped() -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(smooth()), torch.compile(nn.Linear(3, 8), backend="eager"), nn.Linear(8, 3))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    slopes = vmap(grad(lambda row: model(row[None]).sum()))(x)
    return mse(model, x, y) + slopes.square().mean()


def tangent(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output, slope = jvp(model, (x,), (torch.ones_like(x),))
    return F.mse_loss(output, y) + slope.square().mean()


def forces(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.requires_grad_(True)
    output = model(x)
    (force,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.mse_loss(output, y) + force.square().mean()


def reinforced(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A penalty on the gradient by the parameters."""
    loss = mse(model, x, y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "autograd.Function": (Custom, mse),
    "autocast": (Autocast, mse),
    "LSTM": (Recurrent, mse),
    "weight and spectral norm": (Normalised, mse),
    "running average": (Average, mse),
    "literal tensors": (Literals, mse),
    "vmap(grad) in the loss": (smooth, penalty),
    "jvp in the loss": (smooth, tangent),
    "autograd.grad by the inputs": (smooth, forces),
    "autograd.grad by the parameters": (smooth, reinforced),
    "replaced buffer and attribute": (Replaced, mse),
    "printing, hooks, attributes": (Talkative, talkative),
    "sizes in the data": (Selected, mse),
    "checked operators": (Solved, mse),
    "wrappers": (wrapped, mse),
}
