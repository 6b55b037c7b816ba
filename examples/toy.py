"""What the examples share: a small GPT, batches, and lines that two runs can be compared by."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH, VOCABULARY, LENGTH = 16, 32, 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]  # a token sees those before it
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(mean)))))


class GPT(nn.Module):
    def __init__(self, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the ones that follow them, [4, 8] each; others in each step and on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    text = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def say(*words: object) -> None:
    """Prints on rank 0; numbers with all of their digits."""
    if dist.get_rank() == 0:
        print(*(f"{word:.9g}" if isinstance(word, float) else word for word in words), flush=True)


def full(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor whose rows lie on several ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def say_weights(model: nn.Module, name: str = "weights") -> None:
    """Prints the sum of all weights and a digest of their bits."""
    total, bits = 0.0, hashlib.sha256()
    for value in model.state_dict().values():
        whole = full(value).detach().double()
        total += whole.abs().sum().item()
        bits.update(whole.numpy().tobytes())
    say(name, total, bits.hexdigest()[:16])
