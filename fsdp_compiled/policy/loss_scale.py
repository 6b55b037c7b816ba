"""The settings of loss scaling. `passes/loss_scale` is the pass that uses them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled in backward, so that small gradients are no zeros in fp16: `torch.amp.GradScaler`'s rule.

    ``init``: the first scale. A step whose gradients are not finite multiplies it by ``backoff``; ``interval`` good
    steps in a row multiply it by ``growth``. With both at 1 it stays as it is.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        for name, low, high in (("init", 0.0, math.inf), ("growth", 1.0, math.inf), ("backoff", 0.0, 1.0)):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < math.inf and low <= value <= high):
                bounds = {"init": "a positive number", "growth": "1 or more", "backoff": "more than 0 and at most 1"}
                raise ValueError(f"LossScale.{name} is {value!r}; expected {bounds[name]}.")
        if not isinstance(self.interval, int) or isinstance(self.interval, bool) or self.interval < 1:
            raise ValueError(f"LossScale.interval is {self.interval!r}; expected a positive whole number of steps.")

    @property
    def dynamic(self) -> bool:
        return (self.growth, self.backoff) != (1, 1)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
