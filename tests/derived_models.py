"""Plain models that bring no plan for tensor parallelism, and what is odd about some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.cut_models import VOCABULARY, WIDTH

HEADS = 4
HEAD = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Queries in groups, positions, a norm of heads if wanted; -1 stands for the number of heads unless ``fixed``."""

    def __init__(self, keys: int = 2, norm: bool = False, fixed: bool = False) -> None:
        super().__init__()
        self.heads, self.keys = (HEADS, keys) if fixed else (-1, -1)
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, keys * HEAD, bias=False), nn.Linear(WIDTH, keys * HEAD, bias=False)
        self.norm = RMSNorm(HEAD) if norm else nn.Identity()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = self.norm(q.view(b, t, self.heads, HEAD)) * angles[:t, None]
        k, v = (one.view(b, t, self.keys, HEAD).transpose(1, 2) for one in (k, v))
        q = q.transpose(1, 2)
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) / HEAD**0.5).masked_fill(later, float("-inf")).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 64 if fused else 32, bias=False)
        self.w2 = nn.Linear(32, WIDTH, bias=False)
        self.w3 = None if fused else nn.Linear(WIDTH, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x).chunk(2, -1) if self.w3 is None else (self.w1(x), self.w3(x))
        return self.w2(F.silu(gate) * up)


class Experts(nn.Module):
    """Two of three for each token, by a router, whose probabilities weigh what goes in, or what comes out."""

    def __init__(self, before: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(3))
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.router(x)[..., :3].softmax(-1).topk(2, -1)
        weights = [(share * (chosen == i)).sum(-1, keepdim=True) for i in range(3)]
        pairs = zip(weights, self.experts, strict=True)
        return sum(expert(w * x) if self.before else w * expert(x) for w, expert in pairs)  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self, number: int, feed: Callable[[], nn.Module], **attention: Any) -> None:
        super().__init__()
        self.number = number
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention, self.feed = Attention(**attention), feed()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    angles: torch.Tensor

    def __init__(
        self, feed: Callable[[], nn.Module] = FeedForward, tied: bool = False, depth: int = 2, **attention: Any
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(number, feed, **attention) for number in range(depth))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("angles", torch.linspace(0, 1, 32)[:, None].cos().repeat(1, HEAD))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """Two of these, on features."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Flat(nn.Module):
    """Attention and feed-forward side by side, no module between a block and its layers."""

    def __init__(self, heads: int = -1) -> None:
        super().__init__()
        self.heads, self.size = (heads, -1) if heads > 0 else (-1, HEAD)
        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2) for w in (self.a, self.b, self.c))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.d(mixed) + self.f(F.gelu(self.e(y)))


class Fused(nn.Module):
    """q, k and v of one layer: all queries first, as GPT-2 has them, or a head's three side by side, as GPT-NeoX."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head = by_head
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(x)
        if self.by_head:
            q, k, v = qkv.view(b, t, -1, 3 * HEAD).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (one.view(b, t, -1, HEAD).transpose(1, 2) for one in qkv.chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class Softmax(nn.Module):
    """Of what would be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x).softmax(-1))


class Penalty(Llama):
    """Its loss has a weight that would be cut."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first: Any = self.layers[0]
        return super().forward(tokens).mean() + first.attention.wq.weight.square().mean()
