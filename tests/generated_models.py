"""Small models drawn from a seed: ties, frozen parts, odd sizes, several dtypes and groups, another memory order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded

ROWS = 12  # shared by 1 to 4 ranks
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda groups: torch.optim.AdamW(groups, lr=0.01),
    lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
]


class Layer(nn.Module):
    def __init__(self, draw: random.Random, rows: int, columns: int) -> None:
        super().__init__()
        weight = torch.randn(rows, columns, dtype=draw.choice([torch.float32, torch.float64, torch.bfloat16]))
        if draw.random() < 0.3:
            weight = weight.t().contiguous().t()
        self.weight = nn.Parameter(weight, requires_grad=draw.random() < 0.8)
        self.bias = nn.Parameter(torch.randn(rows, dtype=draw.choice([torch.float32, torch.float64])))
        if draw.random() < 0.3:
            self.gain = nn.Parameter(torch.tensor(draw.random()))
        self.norm = nn.BatchNorm1d(rows, affine=draw.random() < 0.5) if draw.random() < 0.3 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.weight.float(), self.bias.float())
        return torch.tanh(self.norm(x * self.gain if hasattr(self, "gain") else x))


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width, depth = draw.randint(2, 11), draw.randint(2, 5)
        inner = draw.randint(1, 13)
        self.layers = nn.ModuleList()
        for index in range(depth):
            self.layers.append(Layer(draw, inner, width) if index % 2 == 0 else Layer(draw, width, inner))
        for index in range(2, depth):
            if draw.random() < 0.4:
                self.layers[index].weight = self.layers[index - 2].weight
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build(seed: int, values: int, world: int) -> Sharded:
    """The same model for a seed, in other shards for another world; ``values``: the seed of its weights."""
    draw = random.Random(seed)
    torch.manual_seed(values)
    model = Model(draw)
    trained = [one for one in model.parameters() if one.requires_grad]
    draw.shuffle(trained)
    cuts = sorted(draw.sample(range(1, len(trained)), min(draw.randint(0, 2), len(trained) - 1)))
    groups = [
        {"params": trained[first:last], "weight_decay": 0.01 * index}
        for index, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(trained)]))
    ]
    optimizer = draw.choice(OPTIMIZERS)(groups)
    way = random.Random(f"{seed} {world}")
    policy = Policy(
        lower="eager",
        shard=way.choice(["zero3", "zero2", "zero1", "ddp"]),
        bucket_mb=way.choice([0, 0.0001, 1]),
    )
    return compile_sharded(model, optimizer, loss=lambda model, x: model(x), policy=policy)


def train(sharded: Sharded, rank: int, world: int, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(ROWS, sharded.model.width, generator=torch.Generator().manual_seed(step))
        sharded.step(x.chunk(world)[rank])
