"""Direct preference optimization: two forwards of the model before one backward, beside a frozen reference.

torchrun --nproc-per-node 2 examples/preferences.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from toy import GPT, batch, say, say_weights

from fsdp_compiled import fully_shard

BETA = 0.1


def sharded():
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def log_probability(model, tokens, targets):
    return model(tokens).log_softmax(-1).gather(-1, targets[..., None]).sum((1, 2))  # [rows]


dist.init_process_group("gloo")
model, reference = sharded(), sharded().requires_grad_(False).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    chosen, rejected = batch(step), batch(500 + step)
    with torch.no_grad():
        expected = log_probability(reference, *chosen) - log_probability(reference, *rejected)
    margin = log_probability(model, *chosen) - log_probability(model, *rejected)
    loss = -F.logsigmoid(BETA * (margin - expected)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say("step", step, "loss", loss.item())
say_weights(model)
dist.destroy_process_group()
