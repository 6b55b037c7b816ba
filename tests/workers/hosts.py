"""Trains on several hosts, one step after another, and writes what each rank comes to.

hosts.py RESULT FOLDER KIND STEPS under torchrun or forked. KIND: step; save (each step is saved; goes on from the
newest of what is saved); exchange (local steps, exchanged after every third, two steps on the way); units (a layer
each); neighbours (the same, and each host keeps units until backward). A rank's lines, in FOLDER/rank<r>.jsonl, are
where it is, a step each, and its error. RESULT: a digest of all weights, and what the network card of rank 0's host
sent meanwhile, beside what the program says.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench import fewer_bytes
from bench.hosts import sent
from fsdp_compiled import OuterSGD, Policy, compile_sharded
from fsdp_compiled.distributed import watchdog
from fsdp_compiled.plan.plan import axis_of

WIDTH, COUNTED = 256, 5  # steps, the last ones, whose bytes are counted


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def run(result: Path, folder: Path, kind: str, steps: int, tell: Callable[[dict[str, Any]], None]) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kinds: dict[str, dict[str, Any]] = {
        "exchange": {"shard": "ddp", "sync_every": 3, "outer": OuterSGD(overlap=2)},
        "save": {"network": "measure"},
        "units": {"bucket_mb": 0},
        "neighbours": {"bucket_mb": 0, "reshard_onto": 2},
    }
    fields = kinds.get(kind, {})
    units = nn.Linear if "bucket_mb" in fields else None
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager", **fields), units=units)
    first = sharded.load(folder / "saved") if kind == "save" and (folder / "saved").exists() else 0
    tell({"host": os.uname().nodename, "pid": os.getpid(), "first": first, "network": sharded.plan.policy.network})
    before = sent()
    for step in range(first, steps):
        if step == steps - COUNTED:
            before = sent()
        draw = torch.Generator().manual_seed(1000 * step + rank)
        value = sharded.step(torch.randn(4, WIDTH, generator=draw)).item()
        tell({"step": step + 1, "loss": value})
        if kind == "save":
            sharded.save(folder / "saved", step=step + 1, wait=True)
    own = sent() - before
    if kind == "exchange":
        sharded.synchronize()
    weights = sharded.full_state_dict()
    if rank == 0:
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
        said = fewer_bytes.sent(sharded.program, dist.get_world_size(), "reduce", inside=axis_of(2))
        result.write_text(json.dumps({"weights": digest, "sent": own, "said": COUNTED * said}))
    dist.destroy_process_group()


def main(result: Path, folder: Path, kind: str, steps: int) -> None:
    watchdog.SILENCE, watchdog.PATIENCE = 6.0, 2.0
    with (folder / f"rank{os.environ['RANK']}.jsonl").open("a") as file:

        def tell(what: dict[str, Any]) -> None:
            print(json.dumps({"at": time.time(), **what}), file=file, flush=True)

        try:
            run(result, folder, kind, steps, tell)
        except Exception as error:
            tell({"error": type(error).__name__, "message": str(error)})
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
