"""Calls under `fully_shard` of two ranks held against eager PyTorch; a case each; see ``ranks.py``.

torchrun --nproc-per-node 2 verified_call.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, fully_shard
from fsdp_compiled.capture.guards import Guards
from tests.stale_models import Layers, Scaled, set_scale
from tests.workers.fully_shard_classes import Weight
from tests.workers.ranks import RANK, main


def shard(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, policy=Policy(lower="eager", **options))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: Any, optimizer: Any, seed: int, rows: int = 4) -> float:
    generator = torch.Generator().manual_seed(2 * seed + RANK)
    x, y = torch.randn(rows, 6, generator=generator), torch.randn(rows, 2, generator=generator)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def same() -> Any:
    found = []
    for verify in (False, 1):
        model, optimizer = shard(verify=verify)
        torch.manual_seed(5 + RANK)
        found.append([step(model, optimizer, seed) for seed in range(4)])
    return found[0] == found[1]


def own_lengths() -> Any:
    """A rank's program is new to it in a call in which the other's is not; evaluations between the steps."""
    found = []
    for verify in (False, True):
        model, optimizer = shard(verify=verify)
        torch.manual_seed(5 + RANK)
        values = []
        for seed, rows in enumerate(((4, 4, 4, 5, 6), (4, 5, 6, 4, 4))[RANK]):
            values.append(step(model, optimizer, seed, rows))
            with torch.no_grad():
                values.append(float(model(torch.ones(rows, 6)).sum()))
        found.append(values)
    return found[0] == found[1]


def held_back() -> Any:
    """A backward whose gradients wait is not compared, nor is the one that they go with."""
    found = []
    for verify in (False, 1):
        model, optimizer = shard(verify=verify)
        torch.manual_seed(5 + RANK)
        losses = []
        for seed in range(4):
            model.set_requires_gradient_sync(seed % 2 == 1)
            generator = torch.Generator().manual_seed(2 * seed + RANK)
            loss = model(torch.randn(4, 6, generator=generator)).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(losses)
    return found[0] == found[1]


class OwnClass(nn.Module):
    """A weight that travels as its signs and a scale, and a derivative that reads a Python value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.linear.weight = nn.Parameter(Weight(self.linear.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(Scaled.apply(self.linear(x)))


def of_own_class(verify: bool | int) -> Any:
    torch.manual_seed(0)
    model = OwnClass()
    fully_shard(model, policy=Policy(lower="eager", verify=verify))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seed in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * seed + RANK))
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if seed == 1 and verify == 2:
            Guards.hold = lambda _: True  # type: ignore[method-assign]
            set_scale(-1.0 if RANK else 1.0)
    return losses


def own_class() -> Any:
    return of_own_class(False) == of_own_class(1)


def own_class_stale() -> Any:
    hold = Guards.hold
    try:
        return of_own_class(2)
    finally:
        Guards.hold = hold  # type: ignore[method-assign]
        set_scale(1.0)


def stale_on_one() -> Any:
    model, optimizer = shard(verify=1)
    step(model, optimizer, 0)
    Guards.hold = lambda _: True  # type: ignore[method-assign]
    if RANK:
        model.gain = 2.0
    return step(model, optimizer, 1)


main(globals())
