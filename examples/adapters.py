"""Low-rank adapters on frozen weights (LoRA): what is frozen is gathered, and has neither gradients nor state.

torchrun --nproc-per-node 2 examples/adapters.py
"""

import torch
import torch.distributed as dist
from torch import nn
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard


class Adapted(nn.Module):
    """``linear(x) + b(a(x))``, where only a and b are trained."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT().requires_grad_(False)
for layer in model.layers:
    layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    fully_shard(layer)
fully_shard(model)

trained = [one for one in model.parameters() if one.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
for step in range(4):
    tokens, targets = batch(step)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say("step", step, "loss", loss.item())
say("without gradient or state", sum(one not in optimizer.state for one in model.parameters()))
say_weights(model)
dist.destroy_process_group()
