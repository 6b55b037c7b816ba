"""Trains one GPT twice, by `compile_sharded` and by PyTorch's own means, and says how far they are apart.

``torchrun parity.py RESULT``: every case for this number of ranks; ``RESULT "sgd clip" ...``: these alone. A third
training, the *control*, is the reference with one thing broken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_compiled import Policy, compile_sharded
from tests.chosen import examples
from tests.launch import answer
from tests.loops import full as whole

STEPS = 20
SHORT = examples(8, STEPS)  # for what the others show through all of them
FEW = examples(4, STEPS)  # on four ranks, each with a third of a core
VOCABULARY, LENGTH, BATCH = 67, 16, 2  # odd, so that slices end inside a row
SEED = 1234


@dataclass(frozen=True)
class Case:
    """What is trained by whom. ``control``: what is broken in the reference's second run."""

    control: Literal["rate", "batch", "sum", "unclipped", "unscheduled", "undivided", "unseeded"]
    optimizer: Literal["adamw", "sgd"] = "sgd"
    shard: str = "zero3"
    against: Literal["fsdp2", "ddp", "plain"] = "fsdp2"
    lower: str = "eager"
    clip: float | None = None
    hybrid: bool = False  # a ("replicate", "shard") mesh
    groups: bool = False
    schedule: bool = False
    seeds: bool = False  # each rank builds its model from a seed of its own
    dropout: float = 0.0
    layers: int = 2
    steps: int = SHORT


CASES: dict[int, dict[str, Case]] = {
    1: {
        "adamw": Case("rate", "adamw", against="plain", steps=STEPS),
        "sgd": Case("rate", against="plain", steps=STEPS),
        "dropout": Case("unseeded", "adamw", against="plain", dropout=0.2),
    },
    2: {
        # trained blocks on both sides of the frozen one
        "adamw zero3": Case("undivided", "adamw", groups=True, schedule=True, layers=3, steps=STEPS),
        "sgd zero3 schedule": Case("unscheduled", schedule=True),
        "adamw zero2": Case("batch", "adamw", "zero2"),
        "sgd zero2 seeds": Case("unseeded", shard="zero2", seeds=True, steps=STEPS),
        "adamw zero1": Case("rate", "adamw", "zero1", "ddp"),
        "sgd zero1": Case("sum", shard="zero1", against="ddp"),
        "adamw ddp": Case("batch", "adamw", "ddp", "ddp"),
        "sgd ddp": Case("rate", shard="ddp", against="ddp"),
        "adamw clip": Case("batch", "adamw", clip=0.1),
        "sgd clip": Case("unclipped", clip=0.1),
        "adamw inductor": Case("rate", "adamw", lower="inductor"),
        "sgd inductor": Case("sum", lower="inductor"),
    },
    4: {
        "adamw zero3": Case("batch", "adamw"),
        "sgd zero3": Case("rate", steps=FEW),
        "hybrid": Case("sum", hybrid=True, steps=FEW),
    },
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class GPT(nn.Module):
    """Embeddings tied to the head; the second block is frozen, and so is a part of the first."""

    def __init__(self, layers: int, dropout: float, width: int = 36, heads: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks[1].requires_grad_(False)
        self.blocks[0].norm1.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build(case: Case, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(case.layers, case.dropout)


def optimizer_of(case: Case, model: nn.Module, broken: str | None = None) -> torch.optim.Optimizer:
    parameters: Iterable[Any] = model.parameters()
    if case.groups and broken != "undivided":
        every = list(parameters)
        parameters = [
            {"params": [parameter for parameter in every if parameter.dim() >= 2]},
            {"params": [parameter for parameter in every if parameter.dim() < 2], "weight_decay": 0.0},
        ]
    off = 1 + 1e-4 if broken == "rate" else 1
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3 * off, weight_decay=0.1, foreach=False)
    return torch.optim.SGD(parameters, lr=0.05 * off, momentum=0.9, foreach=False)


def schedule_of(case: Case, optimizer: torch.optim.Optimizer, broken: str | None = None) -> Any:
    if not case.schedule or broken == "unscheduled":
        return None
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.steps)


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token follows from the one before it: what can be learnt moves the losses, and so shows in them."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 1) % VOCABULARY)
    row = torch.stack(tokens, 1)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


@dataclass
class Run:
    """What a training showed: the mean loss of each step, the gradient's norms if any, the weights at its end.

    In `precision`, loss scales are in the place of norms."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def ours(case: Case, rank: int, world: int) -> tuple[Run, dict[str, Any]]:
    """Trained by the package, and what its program did."""
    model = build(case, SEED + rank if case.seeds else SEED)
    optimizer = optimizer_of(case, model)
    schedule = schedule_of(case, optimizer)
    torch.manual_seed(SEED)  # of the dropout masks, that both trainings draw from the same place
    policy = Policy(shard=case.shard, clip=case.clip, lower=case.lower, bucket_mb=0)
    sharded = compile_sharded(model, optimizer, loss=loss_of, mesh=mesh_of(case, world), policy=policy)
    losses, norms = [], []
    for step in range(case.steps):
        losses.append(sharded.step(*batch_of(step, rank)).item())
        norms.append(sharded.grad_norm.item())
        if schedule is not None:
            schedule.step()
    plan, program = sharded.plan, sharded.program
    acted = {
        "captures": sharded.captures,
        "gathers": len(program.marked("gather")),
        "reductions": len(program.marked("reduce")),
        "units": len(plan.units),
        "buffers": len(plan.buffers),
        "trainable buffers": sum(buffer.trainable for buffer in plan.buffers),
        "updates": int(sharded.state.step),
    }
    return Run(losses, norms, sharded.full_state_dict()), acted


def reference(case: Case, rank: int, world: int, broken: str | None = None) -> Run:
    """Trained by `fully_shard`, by `DistributedDataParallel` or by plain eager PyTorch."""
    model = build(case, SEED + 1 if broken == "unseeded" else SEED)
    trained: nn.Module = model
    if case.against == "fsdp2":
        mesh = mesh_of(case, world) or init_device_mesh("cpu", (world,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=case.shard == "zero3")
    elif case.against == "ddp":
        trained = DistributedDataParallel(model)
    optimizer = optimizer_of(case, model, broken)
    schedule = schedule_of(case, optimizer, broken)
    torch.manual_seed(SEED)
    losses, norms = [], []
    for step in range(case.steps):
        source = rank + world if broken == "batch" and rank == world - 1 else rank
        loss = loss_of(trained, *batch_of(step, source))
        (loss * world if broken == "sum" else loss).backward()
        if case.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if broken == "unclipped" else case.clip)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        mean = loss.detach()
        if world > 1:
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return Run(losses, norms, {name: whole(value) for name, value in model.state_dict().items()})


def mesh_of(case: Case, world: int) -> DeviceMesh | None:
    if not case.hybrid:
        return None
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def compare(mine: Run, other: Run) -> dict[str, Any]:
    """Relative distances, and the names of all that is not equal bit for bit."""
    names = sorted({*mine.weights, *other.weights})
    unequal = [f"loss {step}" for step, loss in enumerate(mine.losses) if loss != other.losses[step]]
    unequal += [f"norm {step}" for step, norm in enumerate(other.norms) if norm != mine.norms[step]]
    unequal += [name for name in names if not torch.equal(mine.weights[name], other.weights[name])]
    return {
        "unequal": unequal,
        "losses": relative(mine.losses, other.losses),
        "norms": relative(mine.norms, other.norms) if other.norms else None,
        "weights": {name: distance(mine.weights[name], other.weights[name]) for name in names},
    }


def relative(mine: list[float], other: list[float]) -> float:
    """The largest of the steps' relative differences; NaN if there is one."""
    reference = torch.tensor(other, dtype=torch.float64)
    return ((torch.tensor(mine, dtype=torch.float64) - reference) / reference).abs().max().item()


def distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    if torch.equal(mine, other):
        return 0.0  # a tensor of zeros has no relative distance
    return ((mine.double() - other.double()).norm() / other.double().norm()).item()


def measure(case: Case, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """One case; only rank 0 has weights to compare."""
    mine, acted = ours(case, rank, world)
    right = reference(case, rank, world)
    wrong = reference(case, rank, world, case.control)
    if rank != 0:
        return {}
    start = build(case, SEED)
    return {
        "acted": acted,
        "reference": compare(mine, right),
        "control": compare(mine, wrong),
        "smallest norm": min(mine.norms),
        "frozen": [name for name, value in start.named_parameters() if not value.requires_grad],
        "unmoved": [name for name, value in start.named_parameters() if torch.equal(value, mine.weights[name])],
    }


def main(*names: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: measure(case, rank, world) for name, case in CASES[world].items() if name in names or not names}


if __name__ == "__main__":
    answer(main)
