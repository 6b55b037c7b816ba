"""What is trained: the models of `simulate`'s presets, and batches from which something can be learnt.

A *preset* is a model and its batch, and how often it is stepped. *Blocks* are what FSDP2 is applied to one by one,
and what becomes a unit each in this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compiled.cli import simulate

Batch = tuple[Tensor, Tensor]  # tokens and targets, [rows, context] int64


@dataclass(frozen=True)
class Preset(simulate.Preset):
    rounds: int = 1
    steps: int = 1  # a rival takes in a round

    @property
    def tp(self) -> Any:
        """`Policy.tp`: the plan that Llama brings; of our GPT (q, k and v are one matrix) the feed-forward alone."""
        return "auto" if self.llama else {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.model.layers if self.llama else model.layers)

    def batches(self, world: int, seed: int, count: int) -> list[Batch]:
        """Whole batches, [world * batch, context]: each token follows from the one before it."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for _ in range(count):
            column = torch.randint(self.vocabulary, (world * self.batch,), generator=generator)
            columns = [column]
            for _ in range(self.context):
                column = (5 * column + 1) % self.vocabulary
                columns.append(column)
            rows = torch.stack(columns, 1)
            made.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        return made

    def __str__(self) -> str:
        kind = "Llama" if self.llama else "GPT"
        return f"{kind}, {self.layers} layers of width {self.width}, {self.batch} x {self.context} tokens a rank"


TURNS = {"thin": (12, 5), "small": (12, 2), "large": (6, 1), "llama": (10, 2)}  # rounds, and steps in one
PRESETS = {
    name: Preset(**vars(preset), rounds=TURNS[name][0], steps=TURNS[name][1])
    for name, preset in simulate.PRESETS.items()
}


def rows_of_rank(batch: Batch, rank: int, rows: int) -> Batch:
    """A rank's rows of a whole batch."""
    tokens, targets = (part[rank * rows : (rank + 1) * rows].contiguous() for part in batch)
    return tokens, targets


def on_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    return [(tokens.to(device), targets.to(device)) for tokens, targets in batches]
