"""Leaves with its process group still referred to, and gloo's threads waiting for the interpreter's lock.

torchrun --nproc-per-node 4 held.py RESULT CLOSED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_compiled.distributed.process_group import close

dist.init_process_group("gloo")
held = dist.group.WORLD
found: list[Any] = [None] * dist.get_world_size()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps("left"))
dist.barrier()
sys.setswitchinterval(1000)  # seconds: who has the lock keeps it until it waits for something
for _ in range(3):
    dist.all_gather_object(found, dist.get_rank())
if sys.argv[2] == "closed":
    close()
else:
    dist.destroy_process_group()
