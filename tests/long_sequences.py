"""A model whose attention goes over stretches of sequences, its whole batches, and its training by eager PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import SequenceAttention
from fsdp_compiled.capture.layers_across_ranks import part_of
from tests.cut_models import sgd

VOCABULARY, WIDTH, HEAD, TIME, STEPS = 17, 16, 4, 16, 3


class Block(nn.Module):
    def __init__(self, axis: Any, keys: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys * HEAD), nn.Linear(WIDTH, keys * HEAD)
        self.attend = SequenceAttention(axis)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v, positions).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Long(nn.Module):
    def __init__(self, axis: Any = "shard", keys: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block(axis, keys) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())


def whole(step: int, row: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(10 * step + row)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 2, TIME), generator=generator)
    return tokens, targets, torch.arange(TIME)


def spread(ranks: int, rows: int, across: bool = False) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step, each rank's stretch: neighbours have parts of the same sequences, or, ``across``, every other rank."""
    return [
        [
            tuple(
                part_of(one, index, ranks, one.dim() - 1)
                for one in whole(step, row)
            )
            for row, index in (
                [(row, index) for index in range(ranks) for row in range(rows)]
                if across
                else [(row, index) for row in range(rows) for index in range(ranks)]
            )
        ]
        for step in range(STEPS)
    ]  # fmt: skip


def eager(model: nn.Module, rows: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(loss(model, *whole(step, row)) / rows for row in range(rows))
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}
