"""What `simulate` says of long sequences, and of experts, on eight GPUs of a node; nothing is run, and none is needed.

    python -m bench.long_sequences

*A row a rank*: each rank has sequences of its own. *A stretch a rank*: eight sequences one after the other, of which
each rank has an eighth (`SequenceAttention`); one of them is simulated. Both are for the same tokens. Experts: all
gathered as any parameters are, or each cut over the node (``tp``); what sending tokens to experts would carry is
arithmetic, since no program of ours does it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench import RESULTS
from fsdp_compiled import Estimate, Policy, SequenceAttention, simulate
from fsdp_compiled.cli.machine import versions
from fsdp_compiled.plan.hardware import GPU

RANKS, LAYERS, WIDTH, HEADS, VOCABULARY = 8, 2, 2048, 16, 32_000
TIMES = (8_192, 32_768, 131_072)
EXPERTS, CHOSEN, TOKENS = 8, 2, 4_096  # TOKENS: of a rank


class Whole(nn.Module):
    """Attention of a rank that has all of its sequences."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Each expert takes its share of the tokens; which ones they are does not matter for what a step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Feed() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1)
        places = torch.arange(CHOSEN * x.shape[1], device=x.device) % x.shape[1]
        parts = x[:, places].chunk(EXPERTS, 1)
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], 1)
        return sum(done.chunk(CHOSEN, 1)) * share.amax(-1, keepdim=True)  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self, attend: nn.Module, feed: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.attend, self.feed = attend, feed

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v, positions).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    def __init__(self, attend: type[nn.Module], feed: type[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        made = [SequenceAttention("shard") if attend is SequenceAttention else attend() for _ in range(LAYERS)]
        self.layers = nn.ModuleList(Block(one, feed()) for one in made)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def step(
    attend: type[nn.Module], feed: type[nn.Module], time: int, shape: dict[str, int], rows: int = 1, **policy: Any
) -> Estimate:
    tokens = torch.zeros(rows, time, dtype=torch.int64, device="meta")
    batch = tokens, torch.zeros(time, dtype=torch.int64, device="meta")
    return simulate(lambda: Model(attend, feed), None, batch, shape, GPU, Policy(recompute="unit", **policy))


def figures(said: Estimate, rows: float = 1) -> dict[str, Any]:
    return {
        "ms a row": round(1e3 * said.seconds / rows, 3),
        "of these waiting": round(1e3 * said.exposed / rows, 3),
        "peak GiB": round(said.memory.peak.nbytes / 2**30, 2),
        "sent GiB": {axis: round(size / 2**30, 3) for axis, (_, size) in said.sent.items()},
    }


def main() -> None:
    whole, plan = {"shard": RANKS}, {"layers.*.feed.experts.*.up": "colwise", "layers.*.feed.experts.*.down": "rowwise"}
    times = {
        str(time): {
            "a row a rank": figures(step(Whole, Feed, time, whole), RANKS),
            "a stretch a rank": figures(step(SequenceAttention, Feed, time // RANKS, whole)),
        }
        for time in TIMES
    }
    tokens = 4 * LAYERS * CHOSEN * TOKENS * WIDTH * 4  # there and back, forward and backward; float32
    experts = {
        "all gathered": figures(step(Whole, Mixture, TOKENS, whole), RANKS),
        "each cut over the node": figures(
            step(Whole, Mixture, TOKENS, {"shard": 1, "tp": RANKS}, rows=RANKS, tp=plan), RANKS
        ),
        "GiB of weights": round(LAYERS * EXPERTS * 8 * WIDTH * WIDTH * 4 / 2**30, 3),
        "GiB of tokens that would go to experts and back": round(tokens / 2**30, 3),
    }  # fmt: skip
    result = {
        "command": "python -m bench.long_sequences",
        "versions": versions(),
        "model": {"ranks": RANKS, "layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY},
        "times": times,
        "experts": {"tokens a rank": TOKENS, "experts": EXPERTS, "of a token": CHOSEN, **experts},
    }
    (RESULTS / "long-sequences.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
