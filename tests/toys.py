"""The small network that most tests train, its loss, its batches and its optimizers: one place, so that all mean the
same by them.

A module that is itself what a test is about stays in that test's file. `models` makes generated ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy

EAGER = Policy(lower="eager")
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Maps ``float32[rows, width]`` to ``float32[rows, 2]``; each block is a unit."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def net() -> nn.Sequential:
    """Maps ``float32[rows, 4]`` to ``float32[rows, 2]``."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def build(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x).to(y.dtype), y)  # torch 2.11 differentiates no other dtype


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batches(count: int, rows: int = 5, width: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(rows, width, generator=generator), torch.randn(rows, 2, generator=generator)) for _ in range(count)
    ]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def same_weights(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two state dicts hold the same names and, bit for bit, the same values."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
