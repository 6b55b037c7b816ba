"""A launcher whose ranks are forks of it: it prints what they found, or is killed while they wait."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_compiled.capture import cache_folder
from fsdp_compiled.cli import forked

OUT = Path(sys.argv[1])


def tell(what: str, value: object) -> None:
    (OUT / f"{what}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}").write_text(json.dumps(value))


def first_found() -> int:
    """What a rank finds; the first time, rank 1 then fails."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    store.add("ranks", 1)
    while store.add("ranks", 0) < 2:
        time.sleep(0.01)
    found = {
        "imported by": torch.imported_by == os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "place": [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK")],
        "threads": torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]),
        "input": sys.stdin.read(),
        "signals": [signal.getsignal(number).__name__ for number in (signal.SIGINT,)],
        "collects": gc.isenabled(),
        "stopping": bool(select.select([int(os.environ["FSDP_COMPILED_STOP"])], [], [], 0)[0]),
    }
    tell("found", found)
    print("said")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise RuntimeError("no luck")
    return 0


def until_stopped() -> int:
    tell("began", os.getpid())
    stopping = bool(select.select([int(os.environ["FSDP_COMPILED_STOP"])], [], [], 60)[0])
    tell("stopping", stopping)
    return 130


def ended_by(end: Callable[[], Any]) -> int | None:
    """How a fork is said to have ended."""
    with (OUT / "log.txt").open("wb") as log:
        rank = forked.Forked(end, os.environ, log.fileno(), log.fileno(), ())
        assert rank.wait() == rank.poll()
        return rank.poll()


def main() -> None:
    if sys.argv[2] == "killed":
        from fsdp_compiled.cli.launch import launch

        launch(until_stopped, 2, OUT, {"TORCHELASTIC_RESTART_COUNT": "0"})
        return
    temporary = cache_folder._temporary
    temporary.append(tempfile.TemporaryDirectory())  # as where the user's cannot be written
    forked.prepare(2, "eager")
    import torch

    from fsdp_compiled.cli.launch import restarting
    from fsdp_compiled.cli.options import TrainOptions

    torch.imported_by = os.getpid()
    code = restarting(first_found, TrainOptions(out=OUT, nproc=2, max_restarts=1))
    ended = [
        ended_by(end) for end in (lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: sys.exit("why"), lambda: 7)
    ]
    possible = [forked.possible(world) for world in (2, 3)]
    left = Path(temporary[0].name).exists()
    print(json.dumps({"code": code, "possible": possible, "ended": ended, "folder": left}))


main()
