"""What an update's formula depends on besides tensors; constants of the compiled kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Adam:
    """`torch.optim.Adam`'s, or `AdamW`'s where the weight decay is ``decoupled`` from the gradient."""

    DERIVED: ClassVar = ("fresh1", "fresh2", "log_beta1", "log_beta2")

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool

    # Differences of numbers near one are taken here, in float64.
    @property
    def fresh1(self) -> float:
        return 1 - self.beta1

    @property
    def fresh2(self) -> float:
        return 1 - self.beta2

    @property
    def log_beta1(self) -> float:
        return math.log(self.beta1) if self.beta1 else -1e4

    @property
    def log_beta2(self) -> float:
        return math.log(self.beta2) if self.beta2 else -1e4
