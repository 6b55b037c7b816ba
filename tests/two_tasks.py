"""A trunk and a head that only some batches go through, and optimizers that count the steps of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, 0.01),
    "dampened": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1),
}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.trunk(x)
        return self.head(y) if both else y  # type: ignore[no-any-return]


def loss_of(model: nn.Module, x: torch.Tensor, both: bool) -> torch.Tensor:
    return model(x, both).square().mean()  # type: ignore[no-any-return]


def optimizer_of(kind: str, model: Heads, apart: bool) -> optim.Optimizer:
    parts = [{"params": list(one.parameters())} for one in (model.trunk, model.head)]
    return KINDS[kind](parts if apart else model.parameters())
