"""A training script of two layers, run as any is: what it compiled, and with how many calls of the C++ compiler.

python bundled.py RESULT STEPS          one step is one program
torchrun ... bundled.py RESULT STEPS    on several ranks: with `fully_shard`, in a loop of its own
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

compilations: list[str] = []
_start = subprocess.Popen.__init__


def counted(self: Any, args: Any, *others: Any, **named: Any) -> None:
    said = args if isinstance(args, str) else " ".join(map(str, args))
    if any(source in said for source in (".cpp", ".hpp", " -o ")):
        compilations.append(said)
    _start(self, args, *others, **named)


subprocess.Popen.__init__ = counted  # type: ignore[method-assign]


def batch(step: int) -> torch.Tensor:
    return torch.arange(16.0).view(2, 8) / (16 + step)


def trained(model: nn.Module, steps: int) -> list[float]:
    """The losses of plain PyTorch's loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    from fsdp_compiled import Policy, compile_sharded, fully_shard

    steps = int(sys.argv[2])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    plain = copy.deepcopy(model)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        losses = trained(fully_shard(model, policy=Policy(lower="inductor")), steps)
        pieces = None
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean())
        losses = [float(sharded.step(batch(step))) for step in range(steps)]
        pieces = sharded.lowered.count("from the cache on disk")
    found = {"losses": losses, "expected": trained(plain, steps), "compilations": compilations, "pieces": pieces}
    if int(os.environ.get("RANK", "0")) == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
