"""A site that comes and goes, told what to do a line at a time.

python -m tests.workers.open_sites ENDPOINT LEAST SEED RANK WORLD PORT

Each rank reads ``[command, argument]`` from its standard input, and rank 0 answers in a line.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import OuterSGD, Policy, Rendezvous, Sharded, compile_sharded
from fsdp_compiled.runtime.local_steps import LocalSteps

EVERY, PATIENCE, OUTER = 2, 4.0, OuterSGD(0.5, 0.6)


def model_of(seed: int, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def batches(seed: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(100 * seed + rank)
    while True:
        yield torch.randn(4, 8, generator=numbers), torch.randn(4, 3, generator=numbers)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def weights(sharded: Sharded) -> list[float]:
    with sharded.gathered() as whole:
        return [value for one in whole.parameters() for value in one.detach().flatten().tolist()]


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any) -> None:
    raise RuntimeError("this cannot be sent")


def site(endpoint: str, least: str, seed: str, rank: str, world: str, port: str) -> None:
    logging.basicConfig(stream=sys.stderr)
    if world != "1":
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": world}
        dist.init_process_group("gloo")
    model = model_of(int(seed))
    place = Rendezvous(endpoint, int(least), PATIENCE)
    policy = Policy(lower="eager", sync_every=EVERY, outer=OUTER, rendezvous=place)
    sharded = compile_sharded(model, inner(model), loss=loss_of, policy=policy)
    given = batches(int(seed), int(rank))
    for line in sys.stdin:
        command, argument = json.loads(line)
        found: dict[str, Any] = {}
        try:
            if command == "steps":
                found["losses"] = [float(sharded.step(*next(given))) for _ in range(argument)]
            elif command == "save":
                sharded.save(argument, wait=True)
            elif command == "load":
                sharded.load(argument)
            elif command == "synchronize":
                sharded.synchronize()
            elif command in ("die", "fail"):  # once this site and the others have met, before it sends
                LocalSteps._run = {"die": die, "fail": fail}[command]  # type: ignore[assignment]
            found["weights"] = weights(sharded)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        if rank == "0":
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    site(*sys.argv[1:])
