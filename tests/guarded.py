"""A model that reads one of everything that Python has, and a step of it beside the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded

EAGER = Policy(lower="eager")
SCALE = 2.0
WEIGHTS = torch.tensor([1.0, 2.0])


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Reads one of everything that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Part(), nn.Linear(6, 2)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.0)
        self.temp, self.options, self.sizes = 1.0, {"a": 1.0}, [1.0, 2.0]
        self.act = doubled
        self.mask = torch.ones(6)
        self.tensors = {"shift": torch.zeros(2)}
        self.teacher = [nn.Linear(6, 2).requires_grad_(False)]
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(self.part(x) * self.mask)) * self.temp * SCALE
        y = self.act(y) * self.options["a"] * sum(self.sizes)
        return self.head(y) * WEIGHTS + self.offset + self.tensors["shift"] + self.teacher[0](x)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 2, generator=generator)


def pair(make: Callable[[], nn.Module] = Net, loss: Callable[..., Any] = mse) -> tuple[Sharded, Callable[[], Any]]:
    """A sharded model, and a step of the plain one, which is its `model`."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.01), loss=loss, policy=EAGER)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(plain, *batch())
        value.backward()
        optimizer.step()
        return value.detach()

    step.model = plain  # type: ignore[attr-defined]
    return sharded, step
