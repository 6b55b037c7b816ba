"""Models that read Python values in forward and in backward, of which a trace makes constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SCALE = 1.0


def set_scale(value: float) -> None:
    globals()["SCALE"] = value


class Scaled(torch.autograd.Function):
    """The identity, whose derivative reads a Python value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * SCALE


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.linear(x))  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Rows that two ranks do not divide, dropout, statistics, a checkpointed part and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(5))
        self.norm, self.middle, self.again = nn.BatchNorm1d(6), nn.Linear(6, 7), nn.Linear(6, 7)
        self.again.weight = self.middle.weight
        self.head, self.gain = nn.Linear(7, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x = self.norm(x)
        return self.head(self.middle(x) + self.again(x)) * self.gain  # type: ignore[no-any-return]
