"""The settings of local steps and of their outer optimizer. `passes/outer_update` is the pass that uses them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_compiled.policy.loss_scale import is_number


@dataclass(frozen=True)
class OuterSGD:
    """The optimizer that moves all sites' weights at an exchange: ``torch.optim.SGD``, whose gradient is the mean over
    the sites of how far each came. The defaults are those of DiLoCo (Douillard et al., 2023).

    ``lr`` 1, ``momentum`` 0 and ``nesterov`` False: the weights become the mean of the sites' weights.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (is_number(self.lr) and 0 < self.lr < math.inf):
            raise ValueError(f"OuterSGD.lr is {self.lr!r}; expected a positive number.")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"OuterSGD.momentum is {self.momentum!r}; expected a number from 0, and below 1.")
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"OuterSGD.nesterov is {self.nesterov!r}; expected True or False.")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD.nesterov needs a momentum above 0, as in torch.optim.SGD. Give nesterov=False.")


def sites(shard: str, ranks: int, replicas: int) -> tuple[int, int]:
    """Ranks of a site, and how many sites there are, of ``ranks`` along the shard axis and ``replicas`` of them.

    A site is what the shard axis spans; where that axis alone is given, and every rank has everything (``"ddp"``), each
    rank is one.
    """
    return (1, ranks) if shard == "ddp" and replicas == 1 else (ranks, replicas)
