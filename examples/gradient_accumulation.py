"""Gradients of four microbatches are added up, and communicated once: what DDP's users know as ``no_sync``.

torchrun --nproc-per-node 2 examples/gradient_accumulation.py
"""

import contextlib

import torch
import torch.distributed as dist
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

MICROBATCHES = 4


@contextlib.contextmanager
def no_sync(model):
    """Inside, a rank's own gradients are added up."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    total = 0.0
    for micro in range(MICROBATCHES):
        last = micro == MICROBATCHES - 1
        model.set_is_last_backward(last)
        with contextlib.nullcontext() if last else no_sync(model):
            tokens, targets = batch(MICROBATCHES * step + micro)
            loss = loss_of(model(tokens), targets) / MICROBATCHES
            loss.backward()
            total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    say("step", step, "loss", total)
say_weights(model)
dist.destroy_process_group()
