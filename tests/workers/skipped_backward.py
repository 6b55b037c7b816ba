"""Rank 1 leaves out a backward of its own loop: what each rank's next call raised, written by rank 0 as JSON.

torchrun --nproc-per-node 2 skipped_backward.py RESULT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.distributed import watchdog

watchdog.PATIENCE = 1.0
dist.init_process_group("gloo")
rank = dist.get_rank()
model = fully_shard(nn.Linear(4, 2))
for _ in range(2):
    model(torch.ones(3, 4)).sum().backward()
said = "nothing"
try:
    loss = model(torch.ones(3, 4)).sum()
    if rank == 0:
        loss.backward()
    model(torch.ones(3, 4))
except RuntimeError as error:
    said = f"{type(error).__name__}: {error}"
try:
    model(torch.ones(3, 4))
except Exception as error:
    said = f"{said}\nthen {type(error).__name__}: {error}"

result = Path(sys.argv[1])
mine, other = (result.with_suffix(f".{one}") for one in (rank, 1 - rank))  # the group may be of no more use
mine.with_suffix(f".{rank}-written").write_text(said)
mine.with_suffix(f".{rank}-written").rename(mine)
if rank == 0:
    until = time.monotonic() + 60
    while not other.exists() and time.monotonic() < until:
        time.sleep(0.02)
    result.write_text(json.dumps([said, other.read_text()]))
