"""Python values that one rank changes alone, or all of them, on two ranks.

torchrun --nproc-per-node 2 guards.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_compiled import Sharded, compile_sharded
from tests.workers.ranks import EAGER, RANK, batch, main, mse, unchanged


class Net(nn.Module):
    """Each rank relies on a value of its own, which changes no program."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.temp, self.rank = nn.Linear(4, 2), 1.0, RANK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * (self.temp if self.rank >= 0 else 0.0)


def shard(temps: tuple[float, ...] = (1.0,)) -> Sharded:
    """One that has made a step with each of these temperatures."""
    model = Net()
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mse, policy=EAGER)
    for temp in temps:
        sharded.model.temp = temp
        sharded.step(*batch(2))
    return sharded


def one_rank_new() -> Any:
    """A value that one rank alone changes, to one that no program was made with."""
    sharded = shard()
    sharded.model.temp = 1.0 + 2 * RANK
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def one_rank_known() -> Any:
    """Both ranks have a program for either value: the collectives would pair up."""
    sharded = shard((1.0, 3.0))
    sharded.model.temp = 1.0 + 2 * RANK
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def other_values() -> Any:
    sharded = shard()
    sharded.model.temp = 2.0 + RANK
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def one_rank_hook() -> Any:
    sharded = shard()
    if RANK:
        sharded.model.head.register_forward_hook(lambda module, inputs, output: output * 2)
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def all_alike() -> Any:
    """The control: all ranks change the same, there and back."""
    sharded = shard((1.0, 3.0, 1.0, 3.0))
    return {"captures": sharded.captures}


if __name__ == "__main__":
    main(globals())
