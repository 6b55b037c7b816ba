"""The plain loop: AdamW, a schedule, the norm of the gradient clipped, and an evaluation.

torchrun --nproc-per-node 2 examples/plain_loop.py
"""

import torch
import torch.distributed as dist
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for step in range(5):
    tokens, targets = batch(step)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    say("step", step, "loss", loss.item())

model.eval()
with torch.no_grad():
    tokens, targets = batch(100)
    say("evaluation", loss_of(model(tokens), targets).item())
say_weights(model)
dist.destroy_process_group()
