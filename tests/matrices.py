"""A model of matrices, batches and a loss, for optimizers that need whole matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class Block(nn.Module):
    """On two ranks, one has two of the matrices and the other one; the mix is cut."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=bias), nn.Linear(10, 6, bias=bias)
        self.low = nn.Parameter(torch.randn(4, 6) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) + (x @ self.low.t()) @ self.low  # type: ignore[no-any-return]


class Matrices(nn.Module):
    """Wide, tall and square ones; one is stored transposed."""

    def __init__(self, bias: bool = False, idle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(bias) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(6, 6).t() * 0.3)
        if idle:
            self.idle = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.mix


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def batches(count: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(12, 6, generator=draw) for _ in range(count))
