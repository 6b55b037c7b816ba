"""What loops of a user's own train, with either `fully_shard`, and where what two of them leave parts."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.launch import of_all

WIDTH, VOCABULARY, LENGTH = 8, 16, 5
SAME: dict[tuple[int, str], tuple[nn.Module, list[torch.Tensor]]] = {}  # of `same`, with its weights at first


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.dropout, self.checkpointed = nn.Dropout(dropout), checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class GPT(nn.Module):
    def __init__(self, tie: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int, kind: str = "tokens") -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if kind == "tokens":
        shape = (2, LENGTH)
        return (torch.randint(VOCABULARY, shape, generator=generator),
                torch.randint(VOCABULARY, shape, generator=generator))  # fmt: skip
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens, targets = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def gpt(api: Any, mark: dict[str, Any] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(**options)
    for layer in model.layers:
        api.fully_shard(layer, **(mark or {}))
    return api.fully_shard(model, **(mark or {}))


def same(api: Any, kind: str, make: Callable[[], nn.Module]) -> Any:
    """What ``make`` made at first, as it was then, for cases that leave no more than other weights: programs are made
    once for all of them."""
    if (id(api), kind) not in SAME:
        model = make()
        SAME[id(api), kind] = model, [full(one) for one in model.parameters()]
    model, begun = SAME[id(api), kind]
    model.requires_grad_(True).zero_grad()
    with torch.no_grad():
        for one, value in zip(model.parameters(), begun, strict=True):
            assert isinstance(one, DTensor)
            one.copy_(distribute_tensor(value, one.device_mesh, one.placements))
    return model


def same_gpt(api: Any) -> Any:
    return same(api, "gpt", lambda: gpt(api))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [full(one) for one in model.state_dict().values()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if one.grad is None else full(one.grad) for one in model.parameters()]


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train(model: nn.Module, optimizer: Any, steps: int = 3, loss: Callable[..., torch.Tensor] = loss_of) -> list[Any]:
    found: list[Any] = []
    for step in range(steps):
        value = loss(model, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.detach())
    return [*found, *weights(model)]


def squares(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, "rows")[0]).square().mean()


def different(one: Any, two: Any) -> str:
    """Where two results part; empty where they are the same."""
    if len(one) != len(two):
        return f"{len(one)} results and {len(two)}"
    for place, (left, right) in enumerate(zip(one, two, strict=True)):
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            if left.dtype != right.dtype or not torch.equal(left, right):
                off = (left.double() - right.double()).abs().max().item() if left.shape == right.shape else "shape"
                kinds = f"{list(left.shape)} {left.dtype} and {list(right.shape)} {right.dtype}"
                return f"result {place}, {kinds}: off by {off}"
        elif type(left) is not type(right) or left != right:
            return f"result {place}: {left} and {right}"
    return ""


def beside(case: Callable[[Any], Any], theirs: Any, *others: Any) -> str:
    """Where what the case leaves with one of these parts from what it leaves with theirs, on any rank; or its error."""
    try:
        expected = case(theirs)
        said = next(filter(None, (different(expected, case(one)) for one in others)), "")
    except Exception:
        said = traceback.format_exc()[-3000:]
        print(said, file=sys.stderr, flush=True)
    return next((f"rank {rank}: {one}" for rank, one in enumerate(of_all(said)) if one), "")
