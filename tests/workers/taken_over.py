"""What two ranks are told of a model that was taken over, or is not to be: written by rank 0 as JSON.

torchrun --nproc-per-node 2 taken_over.py RESULT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.launch import told

RANK = int(os.environ["RANK"])
X = torch.arange(12.0).reshape(3, 4) / 7 + RANK


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def refused_on_one(change: Callable[[nn.Sequential, torch.optim.Optimizer], Any]) -> dict[str, Any]:
    """Rank 1 does something to its model for which compile_sharded refuses it; both ranks then go on without it."""
    model, optimizer = build()
    loss(model, X).backward()
    optimizer.step()
    undo = change(model, optimizer) if RANK else None
    before = [parameter.tolist() for parameter in model.parameters()]
    error = told(lambda: compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager")))
    same = before == [parameter.tolist() for parameter in model.parameters()]
    same &= all(type(parameter) is nn.Parameter for parameter in model.parameters())
    if undo is not None:
        undo()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
    return {"error": error, "same": same, "finite": bool(sharded.step(X).isfinite())}


def hook(model: nn.Sequential, _: torch.optim.Optimizer) -> Callable[[], Any]:
    return model[2].weight.register_hook(lambda gradient: gradient * 3).remove


def age(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """State that differs inside a group."""
    step = optimizer.state[model[0].weight]["step"]
    step += 1
    return lambda: step.sub_(1)


def saved() -> dict[str, Any]:
    """A step, and the model's own state_dict, on every rank; then what to call instead."""
    model, optimizer = build()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
    sharded.step(X)
    error = told(model.state_dict)
    clipped = told(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    found = sharded.full_state_dict()
    plain, plain_optimizer = build()
    xs = [torch.arange(12.0).reshape(3, 4) / 7 + rank for rank in range(2)]
    sum(loss(plain, x) / 2 for x in xs).backward()  # type: ignore[union-attr]
    plain_optimizer.step()
    same = [torch.allclose(found[name], value, atol=1e-6) for name, value in plain.state_dict().items() if found]
    return {
        "error": error,
        "clipped": clipped,
        "names": list(found),
        "same": all(same),
        "again": told(model.state_dict),
    }


def main() -> None:
    result = {"hook": refused_on_one(hook), "state": refused_on_one(age), "saved": saved()}
    every: list[Any] = [None, None]
    dist.all_gather_object(every, result)
    if RANK == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({case: [one[case] for one in every] for case in result}, file)


if __name__ == "__main__":
    main()
