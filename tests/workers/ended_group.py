"""Calls of two ranks after the process group was ended, and exceptions of a rank's own; a case each; see ``ranks.py``.

torchrun --nproc-per-node 2 ended_group.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import fully_shard
from tests.toys import squares
from tests.workers import ranks
from tests.workers.ranks import RANK, batch, main, net


def told(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def of_a_step() -> Any:
    sharded = ranks.shard()
    sharded.step(*batch(4))
    dist.destroy_process_group()
    calls = {
        "step": lambda: sharded.step(*batch(4)),
        "again": lambda: sharded.step(*batch(4)),
        "evaluation": lambda: sharded(batch(4)[0]),
        "full_state_dict": sharded.full_state_dict,
        "save": lambda: sharded.save("/nowhere"),
        "full_tensor": lambda: next(sharded.model.parameters()).full_tensor(),  # type: ignore[attr-defined]
    }
    return {name: told(call) for name, call in calls.items()}


def of_a_module() -> Any:
    model: Any = fully_shard(net())
    loss = squares(model, batch(4)[0])
    dist.destroy_process_group()
    calls = {
        "backward": loss.backward,
        "forward": lambda: model(batch(4)[0]),
        "unshard": model.unshard,
        "gathered": lambda: model.gathered().__enter__(),
        "full_tensor": lambda: next(model.parameters()).full_tensor(),
    }
    return {name: told(call) for name, call in calls.items()}


class Stop(Exception):
    pass


class Stops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.stops = nn.Linear(4, 2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stops:
            raise Stop("enough")
        return self.linear(x)  # type: ignore[no-any-return]


def stop_on_one() -> Any:
    model = fully_shard(Stops())
    squares(model, batch(4)[0]).backward()
    model.stops = RANK == 1
    squares(model, batch(4)[0]).backward()


def stop_on_both() -> Any:
    """After which both go on."""
    model = fully_shard(Stops())
    squares(model, batch(4)[0]).backward()
    model.stops = True
    found = told(lambda: model(batch(4)[0]))
    model.stops = False
    return {"first": found, "then": told(lambda: squares(model, batch(4)[0]).backward())}


main(globals())
