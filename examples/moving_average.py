"""An exponential moving average of the weights (`AveragedModel`), which is what gets evaluated.

torchrun --nproc-per-node 2 examples/moving_average.py
"""

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # copied before it is sharded
for one in (model, average.module):
    for layer in one.layers:
        fully_shard(layer)
    fully_shard(one)
average.requires_grad_(False).eval()

decayed = [one for one in model.parameters() if one.ndim >= 2]
others = [one for one in model.parameters() if one.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
for step in range(5):
    tokens, targets = batch(step)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    say("step", step, "loss", loss.item())

with torch.no_grad():
    tokens, targets = batch(100)
    say("evaluation", loss_of(average(tokens), targets).item(), "updates", average.n_averaged.item())
say_weights(model)
say_weights(average.module, "average")
dist.destroy_process_group()
