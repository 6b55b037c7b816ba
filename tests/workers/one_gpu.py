"""Two ranks on one device over gloo: their steps, beside plain PyTorch on both batches; written by rank 0 as JSON.

torchrun --nproc-per-node 2 one_gpu.py RESULT DEVICE
"""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded

STEPS = 6
device = torch.device(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
plain = copy.deepcopy(model)
numbers = torch.Generator().manual_seed(1)
batches = [torch.randn(world, 4, 16, generator=numbers).to(device) for _ in range(STEPS)]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
expected = []
for both in batches:
    value = loss(plain, both.flatten(0, 1))
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    expected.append(value.item())
sharded = compile_sharded(
    model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss, policy=Policy(lower="eager")
)
losses = [float(sharded.step(both[rank])) for both in batches]
weights = sharded.full_state_dict()
if rank == 0:
    apart = max(float((weights[name].to(device) - value).abs().max()) for name, value in plain.state_dict().items())
    with open(sys.argv[1], "w") as file:
        json.dump({"losses": losses, "expected": expected, "apart": apart, "replays": sharded.replays}, file)
dist.destroy_process_group()
