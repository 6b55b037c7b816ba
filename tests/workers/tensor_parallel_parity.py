"""Llama of transformers, experts and a ViT beside FSDP2 with the same plan; a ViT's gradients; four models in Inductor.

torchrun --nproc-per-node 4 tensor_parallel_parity.py RESULT [inductor]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import compile_sharded
from tests.cut_models import (
    STEPS,
    VOCABULARY,
    WIDTH,
    Block,
    adamw,
    batch,
    build,
    compare,
    cut,
    loss_fn,
    mean,
    sgd,
    two_by_two,
    whole,
)
from tests.launch import answer_all
from tests.toys import EAGER
from tests.workers.tensor_parallel_models import transformer, words

warnings.filterwarnings("ignore")
BLOCK: Mapping[str, Any] = dict.fromkeys(("attention.q", "attention.k", "attention.v", "up"), ColwiseParallel) | {
    "attention.o": RowwiseParallel, "down": RowwiseParallel
}  # fmt: skip


class Experts(nn.Module):
    """A mixture of two experts, each cut: every token goes through both, by what the router says."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        share, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        y = sum(torch.where(chosen == i, share * expert(x), 0) for i, expert in enumerate(self.experts))
        return self.head(x + y)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.places = nn.Parameter(torch.randn(5, WIDTH) / 10)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers = nn.ModuleList([Block(WIDTH, 4, 0.0)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


class Case(NamedTuple):
    make: Callable[[DeviceMesh], Any]
    loss: Callable[..., torch.Tensor]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]]
    layers: Callable[[Any], list[nn.Module]]


def llama(tp: DeviceMesh) -> Any:
    model = transformer("Llama", tied=True)
    at = {f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel}
    at |= {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}
    plan: dict[str, Any] = {f"model.layers.*.{name}": style() for name, style in at.items()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, tp, plan)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def experts(tp: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = Experts()
    plan = {f"experts.{i}.{j}": RowwiseParallel() if j else ColwiseParallel() for i in range(2) for j in (0, 2)}
    parallelize_module(model, tp, plan)
    return model


def vit(tp: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = ViT()
    parallelize_module(model, tp, {f"layers.0.{name}": style() for name, style in BLOCK.items()})
    return model


def images(step: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + row)
    return torch.randn(2, 3, 8, 8, generator=generator), torch.randint(10, (2,), generator=generator)


def classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


CASES = {
    "gpt": Case(lambda tp: cut(build(), tp), loss_fn, batch, lambda model: list(model.layers)),
    "llama": Case(llama, words, batch, lambda model: list(model.model.layers)),
    "experts": Case(experts, loss_fn, batch, lambda model: []),
    "vit": Case(vit, classes, images, lambda model: list(model.layers)),
}


def trained(case: Case, mesh: DeviceMesh, row: int, make: Callable[[nn.Module], Any], lower: Any = "eager") -> Any:
    model = case.make(mesh["tp"])
    policy = replace(EAGER, lower=lower)
    sharded = compile_sharded(model, make(model), loss=case.loss, mesh=mesh, policy=policy)
    return [sharded.step(*case.batch(step, row)).item() for step in range(STEPS)], [], sharded.full_state_dict()


def theirs(case: Case, mesh: DeviceMesh, row: int, make: Callable[[nn.Module], Any]) -> Any:
    model = case.make(mesh["tp"])
    for module in (*case.layers(model), model):
        fully_shard(module, mesh=mesh["shard"])
    optimizer, losses = make(model), []
    for step in range(STEPS):
        loss = case.loss(model, *case.batch(step, row))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach(), 2))
    return losses, [], {name: whole(value) for name, value in model.state_dict().items()}


def same_plan() -> Any:
    """AdamW, and SGD for one of them."""
    mesh = two_by_two()
    row = mesh["shard"].get_local_rank()
    found = {}
    for name, make in (("llama", adamw), ("experts", adamw), ("vit", adamw), ("experts", sgd)):
        case = CASES[name]
        mine = trained(case, mesh, row, make)
        found[f"{name} {make.__name__}"] = compare(mine, theirs(case, mesh, row, make))
    return found


def gradients() -> Any:
    """`value_and_grad` of a ViT that patterns cut: each rank's gradients are parts of the true ones."""
    mesh = two_by_two()
    torch.manual_seed(0)
    model = ViT()
    reference = ViT()
    reference.load_state_dict(model.state_dict())
    plan = {f"layers.*.{name}": "rowwise" if style is RowwiseParallel else "colwise" for name, style in BLOCK.items()}
    sharded = compile_sharded(model, loss=classes, mesh=mesh, policy=replace(EAGER, tp=plan))
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(4)
    row, place = mesh["shard"].get_local_rank(), mesh["tp"].get_local_rank()
    _, found = sharded.value_and_grad(images.chunk(2)[row], labels.chunk(2)[row])
    classes(reference, images, labels).backward()
    whole_gradients = {name: one.grad for name, one in reference.named_parameters()}
    apart, cuts, other = 0.0, 0, 0.0
    for buffer in sharded.plan.buffers:
        for slot in buffer.slots:
            gradient = whole_gradients[slot.name]
            assert gradient is not None
            parts = [gradient, gradient]
            if slot.leaf.tp is not None and slot.leaf.tp.dim is not None:
                cuts += 1
                parts = list(gradient.chunk(2, slot.leaf.tp.dim))
            own = sharded.plan.part(buffer, slot, row, cut=True)
            for part, mine in ((parts[place], True), (parts[1 - place], False)):
                expected = part.flatten()[own.first : own.last]
                far = (found[slot.name] - expected).abs().max().item() if expected.numel() else 0.0
                apart, other = (max(apart, far), other) if mine else (apart, max(other, far))
    return {"apart": apart, "other parts": other, "cuts": cuts}


def inductor() -> Any:
    mesh = two_by_two()
    row = mesh["shard"].get_local_rank()
    return {
        name: compare(trained(case, mesh, row, sgd, "inductor"), trained(case, mesh, row, sgd))
        for name, case in CASES.items()
    }


if __name__ == "__main__":
    answer_all((inductor,) if "inductor" in sys.argv[2:] else (same_plan, gradients), sys.argv[1])
