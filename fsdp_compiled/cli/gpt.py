"""A byte-level GPT: pre-norm blocks, rotary positions, tied embeddings.

*Width* is the size of the residual stream, *context* the longest sequence. Blocks live in `layers`, so each
becomes a unit of its own; the embedding and the last norm are the root unit.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token a byte


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [batch, heads, time, head]; cos and sin [time, head / 2]."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [batch, heads, time, head]
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # [batch, time, width]


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.feed_norm = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class GPT(nn.Module):
    cos: Tensor  # [context, head / 2]
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        half = config.width // config.heads // 2
        angles = torch.outer(torch.arange(config.context), 10_000 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset_weights(config)

    @torch.no_grad()
    def reset_weights(self, config: GPTConfig) -> None:
        """Every matrix keeps the variance of its input. What is added to the residual stream shrinks with depth, so the
        stream leaves the last block at about the scale at which it entered the first."""
        # It is tied, and therefore small: a byte must not start out as its own likeliest successor.
        nn.init.normal_(self.embed.weight, std=0.02)
        residual = 1 / math.sqrt(2 * config.layers)
        for block in self.layers:
            assert isinstance(block, Block)
            for matrix, scale in (
                (block.attention.qkv, 1.0),
                (block.attention.out, residual),
                (block.up, 1.0),
                (block.down, residual),
            ):
                nn.init.normal_(matrix.weight, std=scale * matrix.in_features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, time] int64, time at most the context -> logits [batch, time, 256]."""
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        # Values that are small enough for the output are too small beside what the blocks add.
        x = self.embed(tokens) * math.sqrt(self.embed.embedding_dim)
        for block in self.layers:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)


def next_byte_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a byte; tokens and targets [batch, time] int64."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW's two groups: matrices decay, norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
