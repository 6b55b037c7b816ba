"""A model and batches whose gradients overflow where they are told to, and a loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_compiled import LossScale, Policy
from tests.simulate import Batch

# Neither factor is a power of two: what is rounded elsewhere ends elsewhere.
SCALE = LossScale(init=48.0, growth=1.7, backoff=0.3, interval=3)


class Net(nn.Module):
    """With BatchNorm, whose statistics eager PyTorch updates in a step that overflows, too."""

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6) if normed else nn.Identity()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def loss(model: nn.Module, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``factor`` is 1, or so large that the gradient overflows where the loss does not."""
    return model(x).square().mean() * factor


def build(normed: bool = True) -> Net:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Net(normed)


def optimizer_of(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch(index: int, overflows: bool = False, sign: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, 6, generator=generator), torch.tensor(sign * 3e38 if overflows else 1.0)


def policy_of(**options: Any) -> Policy:
    return Policy(**{"lower": "eager", "loss_scale": SCALE, **options})
