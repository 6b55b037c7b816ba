"""The model that generated loops train: blocks between an embedding and a head, with what a `Shape` asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, LENGTH = 8, 16, 5
# How forward reads the state that it replaces, [2, WIDTH]: backward reads it again, as it was.
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda state: state.sum(0),
    "view": lambda state: state.view(-1)[:WIDTH],
    "new axis": lambda state: state[None, :, None].amax(1),
    "transposed": lambda state: state.t().unbind(1)[1],
    "expanded": lambda state: state[0].expand(1, LENGTH, WIDTH),
    "chunk": lambda state: state.chunk(2)[0].squeeze(0),
    "narrow": lambda state: state.narrow(0, 1, 1).reshape(WIDTH),
    "as strided": lambda state: state.as_strided((WIDTH,), (1,), 4),
}


class Stop(Exception):
    """The user's own, which forward raises, and the loop catches."""


@dataclass(frozen=True)
class Shape:
    """What a loop's model is made of, and how it is sharded."""

    layers: int
    dropout: float
    statistics: bool  # a BatchNorm
    tied: bool
    checkpointed: str  # of blocks: "", "reentrant" or "new"
    returns: str  # "tensor", "tuple", "dict" or "named"
    dtype: torch.dtype
    reshard: bool | None
    merged: bool  # small neighbours are sent together
    root_alone: bool  # fully_shard is called on the model, and on no block
    mesh: str  # "": all ranks; "replicas": of whole models; "one replica": of two axes
    wrapped: str  # of blocks: "", "checkpoint", or "compile"
    precision: str  # by name of `fsdp2.PRECISIONS`; then beside FSDP2
    carried: str = ""  # state that forward replaces: how it is read (`READS`), or "recurrent"
    bank: bool = False  # a buffer that is returned, and written by the loop
    apart: bool = False  # the head is given to `fully_shard` by itself
    unreached: bool = False  # set_reduce_scatter_unused_params(True)

    def with_more(self, rng: random.Random) -> Shape:
        """With what was thought of later, which every third seed has; the others are the loops that they were."""
        return replace(
            self,
            carried=rng.choice(("", *READS, "recurrent")),
            bank=rng.random() < 0.4,
            apart=not self.root_alone and rng.random() < 0.3,
            unreached=not self.precision and rng.random() < 0.3,
            mesh="backwards" if rng.random() < 0.05 else self.mesh,  # which is refused
        )

    @classmethod
    def draw(cls, rng: random.Random, more: random.Random, precisions: Collection[str]) -> Shape:
        precision = more.choice(["", "", *precisions])
        return cls(
            mesh=more.choice(("", "", "", "replicas", "one replica")),
            wrapped=more.choice(("", "", "", "checkpoint", "compile")),
            precision=precision,
            layers=rng.choice((2, 3, 4)),
            dropout=rng.choice((0.0, 0.0, 0.2)) if not precision else 0.0,
            statistics=rng.random() < 0.2 and not precision,  # of which parts stay whole
            tied=rng.random() < 0.2,
            checkpointed=rng.choice(("", "", "", "", "new", "reentrant")),
            returns=rng.choice(("tensor", "tensor", "tensor", "tuple", "dict", "named")),
            dtype=torch.float32
            if precision
            else more.choice((torch.float64, torch.float64, torch.float64, torch.float32)),
            reshard=rng.choice((True, False, None)) if not precision else True,
            merged=rng.random() < 0.5,
            root_alone=rng.random() < 0.15,
        )


class Named(NamedTuple):
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(shape.dropout) for _ in range(shape.layers))
        self.statistics = nn.BatchNorm1d(WIDTH) if shape.statistics else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        if shape.tied:
            self.head.weight = self.embed.weight
        self.checkpointed, self.returns = shape.checkpointed, shape.returns
        self.left_out: int | None = None  # the block that is
        self.fails = ""  # where it raises
        self.skips_gain = False
        self.carried = shape.carried
        if self.carried:
            self.state = torch.full((2, WIDTH), 0.1, dtype=shape.dtype)
        if self.carried == "recurrent":
            self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if shape.bank:
            self.register_buffer("bank", torch.full((WIDTH,), 0.1))

    def encode(self, words: torch.Tensor, *, by: float) -> torch.Tensor:
        """Another way in, of other arguments."""
        return self.layers[0](self.embed(words)) * by  # type: ignore[no-any-return]

    def carry(self, x: torch.Tensor) -> torch.Tensor:
        """What depends on the state of before, which it replaces."""
        before = self.state.to(x.dtype)
        if self.carried == "recurrent":
            x, _ = self.recurrent(x, before[:1, None].expand(1, len(x), WIDTH).contiguous())
        else:
            x = x * (1 + 0.1 * READS[self.carried](before))
        if self.training:
            mean = x.detach().mean((0, 1)).to(self.state.dtype)
            self.state = torch.stack([mean, before[0].to(mean.dtype) * 0.5])
        return x

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        if self.fails == "begin":
            raise KeyError("this forward fails")
        if self.fails == "stop":
            raise Stop
        x = x if x.is_floating_point() else self.embed(x)
        hidden = []
        for place, layer in enumerate(self.layers):
            if place == self.left_out:
                continue
            if layer.training:  # here, since a block that is computed again would count again
                layer.seen.add_(1)
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant" and x.requires_grad)
            else:
                x = layer(x)
            hidden.append(x)
        if self.statistics is not None:
            x = self.statistics(x.flatten(0, 1)).view_as(x)
        if self.carried:
            x = self.carry(x)
        if mask is not None:
            x = x * mask[..., None].to(x.dtype)
        if hasattr(self, "bank"):
            x = x + self.bank.to(x.dtype)
        logits = self.head(x if self.skips_gain else x * self.gain)
        if hasattr(self, "bank"):
            return {"logits": logits, "hidden": hidden, "bank": self.bank}
        if self.returns == "tuple":
            return logits, (hidden[0], hidden[-1])
        if self.returns == "dict":
            return {"logits": logits, "hidden": hidden}
        return Named(logits, hidden) if self.returns == "named" else logits


def logits_of(result: Any) -> torch.Tensor:
    """Of whatever forward returned."""
    if isinstance(result, dict):
        return result["logits"]  # type: ignore[no-any-return]
    return result[0] if isinstance(result, tuple) else result


def hidden_of(result: Any) -> torch.Tensor | None:
    """What forward returned beside the logits."""
    if isinstance(result, dict):
        return result["hidden"][-1]  # type: ignore[no-any-return]
    return result[1][-1] if isinstance(result, tuple) else None
