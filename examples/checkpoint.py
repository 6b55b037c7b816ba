"""Saves model, optimizer and schedule with ``torch.distributed.checkpoint``, and goes on from there in a new model.

torchrun --nproc-per-node 2 examples/checkpoint.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard


def made(seed):
    torch.manual_seed(seed)
    model = GPT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def train(model, optimizer, schedule, steps):
    for step in steps:
        tokens, targets = batch(step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        say("step", step, "loss", loss.item())


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)

model, optimizer, schedule = made(seed=0)
train(model, optimizer, schedule, range(3))
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state, "schedule": schedule.state_dict()}, checkpoint_id=folder[0])

model, optimizer, schedule = made(seed=1)
weights, state = get_state_dict(model, optimizer)
loaded = {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}
dcp.load(loaded, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
schedule.load_state_dict(loaded["schedule"])
train(model, optimizer, schedule, range(3, 5))
say("rate", schedule.get_last_lr()[0])
say_weights(model)
dist.destroy_process_group()
