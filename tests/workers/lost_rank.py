"""Some ranks, one of which dies, hangs or leaves in some phase; what the others say, and after how long.

vanishing.py RESULT CASE [CASE ...] in a process of its own, a case being WAY/PHASE/WORLD or WAY/PHASE/WORLD/rank0:
killed/step/3, stopped/compile/2, ... It is rank 1; or rank 0, where that holds the store at which they meet. In the
phase ``device`` the others wait where nothing tells them of a closed connection, as for NCCL's kernels on a GPU; with
the way ``agent`` nobody dies but the process that holds the store.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.distributed import call_log, watchdog
from fsdp_compiled.runtime.checkpoint import data_file, saving
from fsdp_compiled.runtime.programs import program_maker
from tests.killable_ranks import Forked
from tests.toys import squares

LIMIT = 60.0
TRIP = 1000.0  # a number in the batch at which `tripwire` strikes


def strike(way: str) -> None:
    """How the rank ends."""
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "left":
        sys.exit(0)
    elif way == "raised":
        raise KeyError("no such luck")
    elif way == "waits":
        print("waits", flush=True)
        time.sleep(10 * LIMIT)


way = ""
victim = 1


@torch.library.custom_op("vanishing::tripwire", mutates_args=())
def tripwire(x: torch.Tensor) -> torch.Tensor:
    if bool((x == TRIP).any()):
        strike(way)
    return x.clone()


tripwire.register_fake(torch.empty_like)
tripwire.register_autograd(lambda context, gradient: gradient)


class Trapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(tripwire(self.first(x) * 0 + x))


def run(rank: int, phase: str) -> None:
    watchdog.BEAT, watchdog.SILENCE, watchdog.PATIENCE, watchdog.HEARING = 0.2, 4.0, 0.5, 0.3
    if phase == "first":
        watchdog.SILENCE = 2 * LIMIT
        if rank == victim:  # whose thread had no turn yet
            watchdog.Watchdog._run = lambda _: None  # type: ignore[method-assign]
    global way
    if phase == "device":
        call_log.backends = lambda _: {"shard": "nccl"}  # type: ignore[assignment]
        way = way if rank == victim else "waits"
    torch.manual_seed(0)
    model = Trapped()
    optimizer = torch.optim.AdamW(model.parameters())
    sharded = compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager"), units=["first", "second"])
    good, trip = torch.ones(2, 4), torch.full((2, 4), TRIP)
    mine = rank == victim
    if phase == "first" and mine:
        strike(way)
    if phase == "compile":
        if mine:
            with mock.patch.object(program_maker, "transform", lambda *_: strike(way)):
                sharded.step(good)
        sharded.step(good)
        return
    for _ in range(2):
        sharded.step(good)
    if phase == "step":
        sharded.step(trip if mine else good)
    elif phase == "device":
        if rank == victim:
            time.sleep(1.0)  # the others are there
        sharded.step(trip)
    elif phase == "forward":
        sharded(good)
        for _ in range(3):  # the others may have all they need for the first
            sharded(trip if mine else good)
    elif phase == "meet":
        if mine:
            strike(way)
        sharded.full_state_dict()
    elif phase == "between":
        if mine:
            strike(way)
        for _ in range(3):
            sharded.step(good)
    else:
        save(sharded, phase, mine)


def save(sharded: Any, phase: str, mine: bool) -> None:
    """In the copy, or, ``writing``, in the background."""
    if mine and phase == "save":
        saving.digest = lambda *_: strike(way)  # type: ignore[assignment]
    if mine and phase == "writing":
        data_file.write = lambda *_: strike(way)  # type: ignore[assignment]
    sharded.save(os.environ["FOLDER"], step=1, wait=True)


def case(name: str) -> dict[str, Any]:
    global way, victim
    way, phase, size, *store = name.split("/")
    world, victim = int(size), -1 if way == "agent" else 1 - len(store)

    def work(rank: int) -> int:
        since = time.monotonic()
        try:
            run(rank, phase)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - since}
            print(json.dumps(answer), flush=True)
            return 3
        return 0

    with tempfile.TemporaryDirectory() as folder:
        environment = {"FOLDER": str(Path(folder, "checkpoints"))}
        ranks = Forked(world, work, Path(folder), environment, on_rank_0=bool(store))
        others = [rank for rank in range(world) if rank != victim]
        if way == "agent":
            ranks.wait(LIMIT, lambda _: all("waits" in ranks.said(rank) for rank in others))
            ranks.end_store()
        since = time.monotonic()
        ended = ranks.wait(LIMIT, lambda codes: all(codes[rank] is not None for rank in others))
        seconds = time.monotonic() - since
        codes = list(ranks.poll())
        ranks.kill()
        return {"ended": ended, "seconds": seconds, "codes": codes, "said": [ranks.said(r) for r in range(world)]}


if __name__ == "__main__":
    result, *cases = sys.argv[1:]
    Path(result).write_text(json.dumps({name: case(name) for name in cases}))
