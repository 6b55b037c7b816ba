"""Blocks compute in bfloat16 and gradients are reduced in float32; weights and optimizer stay in float32.

torchrun --nproc-per-node 2 examples/mixed_precision.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=precision)
fully_shard(model, mp_policy=precision)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
for step in range(4):
    tokens, targets = batch(step)
    logits = model(tokens)
    loss = loss_of(logits.float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say("step", step, "loss", loss.item(), "logits", logits.dtype)
say_weights(model)
dist.destroy_process_group()
