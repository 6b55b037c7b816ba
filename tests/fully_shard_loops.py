"""A small model in a loop of its own, with the gradients of plain PyTorch; in a world of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.toys import net

X, Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 2)


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.mse_loss(model(X), Y)


def plain_gradients() -> tuple[torch.Tensor, ...]:
    model = net()
    return torch.autograd.grad(loss_of(model), list(model.parameters()))


def full(values: Any) -> list[torch.Tensor]:
    return [value.full_tensor() for value in values]


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
