"""float16 with ``torch.amp.GradScaler``: one rank overflows in the third step, which no rank takes.

torchrun --nproc-per-node 2 examples/grad_scaler.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
precision = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=precision)
fully_shard(model, mp_policy=precision)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
for step in range(5):
    tokens, targets = batch(step)
    loss = loss_of(model(tokens).float(), targets)
    if step == 2 and dist.get_rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    say("step", step, "loss", loss.item(), "scale", scaler.get_scale())
say_weights(model)
dist.destroy_process_group()
