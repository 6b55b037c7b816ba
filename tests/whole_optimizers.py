"""Optimizers of a user's own that take whole parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim


class Own(optim.Optimizer):
    """Users' own, that take whole parameters; what each mixes is its own affair."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.total = 0.0
        self.norms: list[torch.Tensor] = []

    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return grad.norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / self.scale(group, grads, p.grad), alpha=group["lr"])


class Counting(Own):
    """Counts in its group; what it keeps of a parameter is of no shape of the parameter's."""

    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return grad.norm() * group["step"] * self.made

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self.made = getattr(self, "made", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    rows = self.state[p].setdefault("rows", [torch.zeros(p.shape[0]), 0])
                    rows[0].add_(p.grad.square().sum(tuple(range(1, p.dim()))))
                    rows[1] += 1
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.mul_(1 - 0.001 * self.state[p]["rows"][0].mean() * self.state[p]["rows"][1])
