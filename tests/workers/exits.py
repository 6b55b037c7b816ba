"""Trains two steps and leaves: nothing here starts or ends the process group.

torchrun --nproc-per-node 2 exits.py RESULT
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sharded = compile_sharded(
    model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=Policy(lower="eager")
)
losses = [sharded.step(torch.ones(3, 4)).item() for _ in range(2)]
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"losses": losses, "backend": dist.get_backend(), "world": dist.get_world_size()}, file)
