"""What somebody's own optimizers begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim


class Own(optim.Optimizer):
    """A base for optimizers whose step is a loop over parameters."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def begin(self, group: dict[str, Any]) -> None: ...

    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"])
