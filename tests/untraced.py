"""Optimizers that are not torch.optim's, a model for them, and the same training by eager PyTorch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, optim


class Average(optim.Optimizer):
    """Runs on shards: element-wise; counts in its groups, in an attribute, and for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "step": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["seen"], state["last"] = torch.zeros_like(p), 0, torch.zeros_like(p)
                state["seen"] += 1
                state["mean"] = state["mean"] * 0.9 + p.grad
                p.mul_(1 - group["lr"] * group["decay"])
                rate = float(group["lr"]) / math.sqrt(state["seen"]) / (2 if self.calls < 3 else 1)
                p.add_(state["mean"] if group["step"] % 2 else p.grad.sign() + state["last"], alpha=-rate)
                state["last"].copy_(p.grad)


class Queue(optim.Optimizer):
    """Runs on whole parameters: averages the last gradients, which it keeps in a deque; counts in its groups."""

    def __init__(self, params: Any, lr: float = 0.1, size: int = 3, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "size": size, "decay": decay, "step": 0})
        self.rates: deque[float] = deque(maxlen=2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            self.rates.append(float(group["lr"]))
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["queue"], state["seen"] = deque(maxlen=group["size"]), 0
                state["seen"] += 1
                state["queue"].append(p.grad.clone())
                p.mul_(1 - group["lr"] * group["decay"])
                if len(state["queue"]) == group["size"] and group["step"] % 2:
                    p.add_(sum(state["queue"]), alpha=-self.rates[-1] / state["seen"])


class Noted(Queue):
    """Reads an attribute of parameters, and keeps one tensor under two names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["pair"] = [torch.zeros_like(p)] * 2
                state["pair"][0].mul_(0.9).add_(p.grad)
                p.sub_(state["pair"][1], alpha=group["lr"] * getattr(p, "scale", 1.0))


class Idle(nn.Module):
    """Has a parameter that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 3)
        self.idle = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Scaled(Idle):
    """Has a note on a parameter, and a parameter of a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.down.weight.scale = 3.0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "decay": 0.0},
    ]


def batches(count: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(4, 6, generator=draw) for _ in range(count))


def eagerly(model: nn.Module, optimizer: optim.Optimizer, batches: Any, clip: float | None = None) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
