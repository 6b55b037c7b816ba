"""Ranks with uneven numbers of batches, a case each; see ``ranks.py``, whose ``main`` runs them.

torchrun --nproc-per-node 2 uneven_inputs.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.workers.ranks import RANK, main, mse, net, run, unchanged

COUNTS = (5, 3)  # batches of each rank
ROWS = ((4, 4, 4, 4, 2), (4, 4, 3))


def stream(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)) for n in ROWS[rank]]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # With the usual eps the last bit of a near-zero gradient becomes a whole step.
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


class Own(torch.optim.AdamW):
    """Is not torch.optim's, so its own step runs on the shards."""


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def reference(weighted: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process on the rows that both ranks have in each step; or, the control, on the mean of the ranks' means."""
    model = net()
    optimizer = adam(model)
    schedule = decay(optimizer)
    losses = []
    for step in range(max(COUNTS)):
        found = [stream(rank)[step] for rank in range(2) if step < COUNTS[rank]]
        if weighted:
            loss = mse(model, *(torch.cat(parts) for parts in zip(*found, strict=True)))
        else:
            loss = torch.stack([mse(model, *batch) for batch in found]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(((found[name] - value).norm() / value.norm()).item() for name, value in expected.items())


def joined(kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> Any:
    """Five batches and three, of uneven rows too, with a scheduler in the loop."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.05, eps=1e-3)
    schedule = decay(optimizer)
    policy = Policy(lower="eager", weigh="rows", dynamic=True)
    sharded = compile_sharded(model, optimizer, loss=mse, policy=policy)
    losses = []
    with sharded.join() as ended:
        for batch in stream(RANK):
            losses.append(sharded.step(*batch).item())
            schedule.step()
    for _ in range(ended.shadowed):
        schedule.step()
    found = sharded.full_state_dict()
    expected, theirs = reference(weighted=True)
    control, _ = reference(weighted=False)
    sharded.step(*stream(RANK)[0])  # the rates agree again
    return {
        "shadowed": ended.shadowed,
        "captures": sharded.captures,
        "steps": int(sharded.state.step),
        "losses": max(abs(a / b - 1) for a, b in zip(losses, theirs, strict=False)),
        "off": [off(found, expected), off(found, control)] if found else [],
    }


def joined_on_shards() -> Any:
    return joined(Own)


def joined_late() -> Any:
    """A rank with no batch at all, kinds of calls and shapes that it has never seen, and microbatches."""
    model = net()
    sharded = compile_sharded(model, adam(model), loss=mse, policy=Policy(lower="eager", weigh="rows"))
    plain = net()
    optimizer = adam(plain)
    first, second, third = stream(0)[2:5]
    with sharded.join() as ended:
        if RANK == 0:
            sharded.accumulate(*first)
            sharded.step(*third)
            value = sharded.value_and_grad(*second)[0]
    found = sharded.full_state_dict()
    x, y = (torch.cat(parts) for parts in zip(first, third, strict=True))
    mse(plain, x, y).backward()
    optimizer.step()
    return {
        "shadowed": ended.shadowed,
        "value": abs(value.item() / mse(plain, *second).item() - 1) if RANK == 0 else 0.0,
        "off": [off(found, plain.state_dict()), off(found, net().state_dict())] if found else [],
    }


def joined_differently() -> Any:
    """Inside join, ranks that call with different shapes are told before anything runs."""
    model = net()
    sharded = compile_sharded(model, adam(model), loss=mse, policy=Policy(lower="eager", weigh="rows"))

    def both() -> None:
        with sharded.join():
            sharded.step(*stream(RANK)[1 + RANK])

    return unchanged(sharded, both)


def joined_refusing() -> Any:
    """Inside join, one rank's batch cannot be taken while the other has run out."""
    model = net()
    sharded = compile_sharded(model, adam(model), loss=mse, policy=Policy(lower="eager", weigh="rows"))

    def both() -> None:
        with sharded.join():
            if RANK:
                sharded.step(object())

    return unchanged(sharded, both)


def ends_early() -> Any:
    """No join: the short rank's process ends, and the other is told who that was."""
    model = net()
    sharded = compile_sharded(model, adam(model), loss=mse, policy=Policy(lower="eager"))
    for x, y in stream(0)[: COUNTS[RANK] - 1]:
        last = unchanged(sharded, lambda batch=(x, y): sharded.step(*batch))
    if RANK:
        sys.exit()  # as at the end of a script: nothing is said but what the package says
    return last


if __name__ == "__main__":
    if sys.argv[2:] == ["ends_early"]:
        dist.init_process_group("gloo")
        answer = run(globals(), "ends_early")
        Path(sys.argv[1]).write_text(json.dumps(answer))
    else:
        main(globals())
