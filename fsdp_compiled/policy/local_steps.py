"""The settings of loss scaling (for `passes.loss_scale`), and of local steps: their outer optimizer
(for `passes.outer_update`), and where sites meet that come and go (for `distributed.sites`).
"""

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


@dataclass(frozen=True)
class OuterSGD:
    """The optimizer that moves all sites' weights at an exchange: ``torch.optim.SGD``. Its gradient is the mean over
    the sites of how far each site's weights moved. The defaults are those of DiLoCo (Douillard et al., 2023).

    ``lr`` 1, ``momentum`` 0 and ``nesterov`` False: the weights become the mean of the sites' weights.

    ``parts``: the model is exchanged in so many parts of about equal size, a part at a time, evenly over
    ``Policy.sync_every`` steps (Streaming DiLoCo: Douillard et al., 2025, https://arxiv.org/abs/2501.18512).
    ``overlap``: a part travels during so many further steps, and moves the weights after them; what a site learned
    meanwhile stays added to its own weights, and is part of the next exchange. 0: sites wait for it.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    parts: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if not (is_number(self.lr) and 0 < self.lr < math.inf):
            raise ValueError(f"OuterSGD.lr is {self.lr!r}; expected a positive number.")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"OuterSGD.momentum is {self.momentum!r}; expected a number from 0, and below 1.")
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"OuterSGD.nesterov is {self.nesterov!r}; expected True or False.")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD.nesterov needs a momentum above 0, as in torch.optim.SGD. Give nesterov=False.")
        for name, least in (("parts", 1), ("overlap", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"OuterSGD.{name} is {value!r}; expected a whole number, {least} or more.")


@dataclass(frozen=True)
class Rendezvous:
    """Where sites meet that come and go, each of them a job of its own (``torchrun``).

    ``endpoint``: ``"host:port"`` of the store that ``fsdp-compiled rendezvous --port PORT`` serves, for as long as any
    site trains. ``least``: how many sites there must be, or an exchange waits. ``patience``: seconds after which a
    site that gives no sign of life is gone, and for which an exchange waits for what a site sends.
    """

    endpoint: str
    least: int = 1
    patience: float = 30.0

    def __post_init__(self) -> None:
        host, _, port = self.endpoint.rpartition(":") if isinstance(self.endpoint, str) else ("", "", "")
        if not host or not port.isdecimal():
            raise ValueError(f'Rendezvous.endpoint is {self.endpoint!r}; expected "host:port".')
        if not isinstance(self.least, int) or isinstance(self.least, bool) or self.least < 1:
            raise ValueError(f"Rendezvous.least is {self.least!r}; expected a whole number of sites, 1 or more.")
        if not (is_number(self.patience) and 0 < self.patience < math.inf):
            raise ValueError(f"Rendezvous.patience is {self.patience!r}; expected a positive number of seconds.")


def sites(shard: str, ranks: int, replicas: int) -> tuple[int, int]:
    """The ranks of a site, and the number of sites. ``ranks``: along the shard axis; ``replicas``: how many such rows.

    A site is one row of ranks along the shard axis. Where the mesh has that axis alone, and every rank has everything
    (``"ddp"``), each rank is a site.
    """
    return (1, ranks) if shard == "ddp" and replicas == 1 else (ranks, replicas)
