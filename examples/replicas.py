"""HSDP: parameters are sharded inside of a group of ranks, and groups are replicas of each other.

torchrun --nproc-per-node 4 examples/replicas.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = GPT()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
say("placements", model.head.weight.placements)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    tokens, targets = batch(step)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say("step", step, "loss", loss.item())
say_weights(model)
dist.destroy_process_group()
