"""Generated loops of `fully_shard` (tests/fuzz/loops/), on real ranks: what became of each seed.

torchrun --nproc-per-node 2 loops.py RESULT FAULT SEED...

``FAULT``: "none", or what is broken here, which the loops must find.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.distributed.device_mesh import connect
from tests.fuzz import loops
from tests.fuzz.loops.sides import Ours

LIMIT = 300  # seconds that a loop may take


def main(result: str, fault: str, *seeds: str) -> None:
    connect(None)
    if fault == "undivided":
        Ours.undivided = True
    elif fault == "uncast":
        Ours.uncast = True
    elif fault == "unasked":
        Guards.hold = lambda guards: True  # type: ignore[method-assign]
    elif fault != "none":
        raise ValueError(f"There is no fault {fault}.")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, tuple[str, str]] = {}
    for seed in map(int, seeds):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        print(f"seed {seed}", flush=True)
        found[str(seed)] = loops.run(seed, rank, world)
        if rank == 0:
            print(*found[str(seed)], flush=True)
            Path(result).write_text(json.dumps(found))
        torch._dynamo.reset()
        if not dist.is_initialized():  # ended by what failed
            break
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
