"""Models that are cut along tp by PyTorch's plans, and their training beside others'."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import Sharded
from fsdp_compiled.capture.guards import Guards
from tests.launch import told
from tests.loops import full as whole
from tests.stale_models import Scaled, set_scale

RANK = int(os.environ.get("RANK", 0))
VOCABULARY, WIDTH, HEAD, TIME, STEPS = 40, 16, 4, 6, 3


class Attention(nn.Module):
    def __init__(self, width: int, head: int, dropout: float) -> None:
        super().__init__()
        self.head, self.dropout = head, dropout
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(F.dropout(y.transpose(1, 2).reshape(b, t, -1), self.dropout, self.training))


class Block(nn.Module):
    def __init__(self, width: int, head: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Net(nn.Module):
    """An embedding, one cut feed-forward layer and a head: what is traced in a second."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        return self.head(x + self.drop(self.down(F.gelu(self.up(x)))))


class ScaledNet(Net):
    """Whose derivative reads a Python value."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(super().forward(tokens))  # type: ignore[no-any-return]


def net(mesh: DeviceMesh | None, dropout: float = 0.0, classes: bool = False, kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    model = kind(dropout)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if classes:
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if mesh is not None:
        parallelize_module(model, mesh, plan)
    return model


class GPT(nn.Module):
    def __init__(self, depth: int = 1, dropout: float = 0.0, head: int = HEAD, recompute: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, head, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


def build(seed: int = 0, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(**options)


def cut(model: GPT, mesh: DeviceMesh, sequence: bool = False, classes: bool = False) -> GPT:
    """PyTorch's own plans: activations between blocks whole on each rank, or cut along time; the tie is kept."""
    out = Shard(-1) if classes else Replicate()
    if sequence:
        top: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=out, use_local_output=not classes),
        }
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        block: dict[str, Any] = {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole,
            "attention.o": RowwiseParallel(output_layouts=Shard(1)), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
    else:
        top = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=out, use_local_output=not classes),
        }
        block = {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    block |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    parallelize_module(model, mesh, top)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    model.head.weight = model.tokens.weight
    return model


def loss_fn(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batch(step: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for all ranks along tp: ``row`` is a rank's place among the data-parallel ones."""
    generator = torch.Generator().manual_seed(100 * step + row)
    first, second = torch.randint(0, VOCABULARY, (2, 2, TIME), generator=generator)
    return first, second


def told_when_stale(call: Callable[[int], Any]) -> str:
    """What a second call says, if the derivative of `ScaledNet` reads another value then, and no guard looks."""
    set_scale(1.0)
    call(0)
    set_scale(1.5)
    with mock.patch.object(Guards, "hold", lambda _: True):
        return told(lambda: call(1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


Run = tuple[list[float], list[float], dict[str, torch.Tensor]]  # losses, norms, weights


def unsharded(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int, clip: float | None = None) -> Run:
    """Eager PyTorch on one rank, on the batches of all."""
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for row in range(rows):
            loss = loss_fn(model, *batch(step, row)) / rows
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: whole(value) for name, value in model.state_dict().items()}


def fsdp2(model: GPT, mesh: DeviceMesh, make: Callable[[nn.Module], Any], row: int, rows: int, **options: Any) -> Run:
    """FSDP2 over the data axes of a model that is cut; without clipping."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = make(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, *batch(step, row))
        loss.backward()
        optimizer.step()
        losses.append(mean(loss.detach(), rows))
    return losses, [], {name: whole(value) for name, value in model.state_dict().items()}


def mean(loss: torch.Tensor, rows: int) -> float:
    """Over all ranks; those along tp have the same."""
    total = loss.double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(loss.dtype).item()


def ours(sharded: Sharded, row: int) -> Run:
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(sharded.step(*batch(step, row)).item())
        norms.append(sharded.grad_norm.item())
    return losses, norms, sharded.full_state_dict()


def compare(mine: Run, other: Run) -> dict[str, Any]:
    """On rank 0, which has all weights: how far losses, norms and weights are apart, and whether to the bit."""
    if RANK != 0:
        return {}
    assert list(mine[2]) == list(other[2]), (list(mine[2]), list(other[2]))
    relative = [
        max((abs(a - b) / abs(b) for a, b in zip(mine[part], other[part], strict=False)), default=0.0)
        for part in (0, 1)
    ]
    apart = max((mine[2][name].double() - other[2][name].double()).abs().max().item() for name in other[2])
    bits = mine[0] == other[0] and all(torch.equal(mine[2][name], other[2][name]) for name in other[2])
    return {"loss": relative[0], "norm": relative[1], "weights": apart, "bits": bits}


def copies_equal(sharded: Sharded, mesh: DeviceMesh) -> bool:
    """Whether what is whole on every rank along tp is the same there, to the bit, optimizer state included."""
    for buffer in sharded.plan.buffers:
        if not buffer.split:
            state = sharded.state
            held = [state.parameters[buffer.key], *(t for k, t in state.optimizer.items() if k.startswith(buffer.key))]
            for tensor in held:
                first = tensor.clone()
                dist.broadcast(first, group=mesh["tp"].get_group(), group_src=0)
                if not torch.equal(first, tensor):
                    return False
    return True


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
