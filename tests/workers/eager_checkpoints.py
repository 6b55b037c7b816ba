"""Checkpoints of an optimizer whose own code runs on whole parameters: two ranks save, and load in other layouts.

torchrun --nproc-per-node 2 eager_checkpoints.py RESULT FOLDER
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.launch import answer, of_all, told
from tests.untraced import Idle, Queue, batches, groups, loss

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BEFORE, AFTER = 5, 4


def build(**policy: Any) -> tuple[Sharded, Queue]:
    model = Idle()
    optimizer = Queue(groups(model))
    return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager", **policy)), optimizer


def train(sharded: Sharded, first: int, last: int) -> list[float]:
    rows = list(batches(last))[first:]
    return [sharded.step(batch.chunk(WORLD)[RANK]).item() for batch in rows]


def whole(sharded: Sharded, optimizer: Queue) -> dict[str, Any]:
    """Weights, state by name, and what the optimizer keeps beside it; complete on rank 0."""
    own = {name: value.clone() for name, value in sharded.state.optimizer.items()}
    every: list[Any] = [own]
    if WORLD > 1:
        every = of_all(own)
    state = {}
    for one in every:  # each owner's, or everyone's
        state |= one
    beside = {"rates": [*optimizer.rates], "steps": [group["step"] for group in optimizer.param_groups]}
    return {"weights": sharded.full_state_dict(), "state": state, "beside": beside}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Bit for bit; on ranks other than 0, what they have of it."""
    return found["beside"] == expected["beside"] and all(
        found[kind].keys() == expected[kind].keys()
        and all(torch.equal(value, expected[kind][name]) for name, value in found[kind].items())
        for kind in ("weights", "state")
    )


def main(folder: str) -> list[Any]:
    sharded, optimizer = build()
    train(sharded, 0, BEFORE)
    sharded.save(folder, wait=True)
    expected = whole(sharded, optimizer)
    losses = train(sharded, BEFORE, BEFORE + AFTER)
    found: dict[str, Any] = {"control": equal(whole(sharded, optimizer), expected)}
    for shard in ("zero3", "zero2", "zero1", "ddp"):
        other, queue = build(shard=shard)
        other.load(folder)
        found[shard] = equal(whole(other, queue), expected)
        far = max(abs(a - b) for a, b in zip(train(other, BEFORE, BEFORE + AFTER), losses))
        found[f"{shard} goes on"] = far == 0 if shard == "zero3" else far < 1e-6
        if shard != "zero3":
            other.load(folder)
            other.save(Path(folder) / shard, wait=True)
            third, queue = build()
            third.load(Path(folder) / shard)
            found[f"{shard} back"] = equal(whole(third, queue), expected)
    if RANK == 0:
        torch.save({**expected, "losses": losses}, Path(folder) / "expected.pt")
        optimizer.rates.append(7.0)  # this rank alone
    found["apart"] = told(lambda: sharded.save(Path(folder) / "apart"))
    return of_all(found)


if __name__ == "__main__":
    answer(main)
