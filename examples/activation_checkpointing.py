"""Activations of each block are computed again in backward, dropout included.

torchrun --nproc-per-node 2 examples/activation_checkpointing.py
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT(dropout=0.1)
for index, layer in enumerate(model.layers):
    model.layers[index] = fully_shard(checkpoint_wrapper(layer))
fully_shard(model)

torch.manual_seed(5 + dist.get_rank())  # each rank drops others
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
