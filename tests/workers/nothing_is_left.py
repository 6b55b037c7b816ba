"""A rank that trains in a process group of its script's own, and what of its process is another afterwards.

torchrun --nproc-per-node 2 nothing_is_left.py RESULT [LEAK]
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.launch import of_all

SETTLING = 20.0  # seconds that threads and sockets of a group that was ended may take


def descriptors() -> list[str]:
    """What this process holds open: files, pipes and sockets, without their numbers."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}").split(":")[0])
        except OSError:  # that of the listing itself
            continue
    return sorted(found)


def around() -> dict[str, Any]:
    end = dist.destroy_process_group
    return {
        "file descriptors": descriptors(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "modules that are another object": {
            name: id(module) for name, module in sys.modules.items() if not name.startswith("fsdp_compiled")
        },
        "destroy_process_group": (id(end), id(end.__code__)),
        "hooks": [id(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.exit, os._exit)],
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "NCCL's settings": {name: value for name, value in os.environ.items() if name.startswith("NCCL")},
        "the group": (id(dist.group.WORLD), dist.is_initialized()),
    }


def train() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
    for _ in range(2):
        sharded.step(torch.ones(3, 4))
    sharded.close()


def differences(before: dict[str, Any]) -> dict[str, str]:
    after = around()
    before_modules, after_modules = (one["modules that are another object"] for one in (before, after))
    after["modules that are another object"] = {name: after_modules.get(name) for name in before_modules}
    return {what: f"{was} -> {after[what]}" for what, was in before.items() if after[what] != was}


def main(result: Path, leak: str = "") -> None:
    dist.init_process_group("gloo")
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))  # what PyTorch itself sets up when it compiles
    dist.all_reduce(torch.zeros(1))
    train()  # what Python and PyTorch import and connect for the first time
    until = time.monotonic() + SETTLING
    while any(name.startswith("fsdp_compiled") for name in around()["threads"]) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.2)
    before = around()
    assert not any(name.startswith("fsdp_compiled") for name in before["threads"]), before["threads"]
    train()
    held = open(os.devnull) if leak else None  # noqa: SIM115
    until = time.monotonic() + SETTLING
    while (found := differences(before)) and time.monotonic() < until and not leak:
        gc.collect()
        time.sleep(0.2)
    total = torch.ones(1)
    dist.all_reduce(total)  # the script's group goes on
    every = of_all(found)
    if dist.get_rank() == 0:
        result.write_text(json.dumps({"differences": every, "sum": total.item()}))
    dist.destroy_process_group()
    del held


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
