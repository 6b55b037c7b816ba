"""A vision transformer that patterns cut on 2 x 2 ranks, for `tensor_parallel_models.py`: weights and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import compile_sharded
from tests.cut_models import (
    STEPS,
    WIDTH,
    Block,
    compare,
    sgd,
    two_by_two,
)
from tests.toys import EAGER


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


VIT = dict.fromkeys(("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v", "layers.*.up"), "colwise")
VIT |= {"layers.*.attention.o": "rowwise", "layers.*.down": "rowwise"}
VIT |= {"layers.*.attention.o": "rowwise", "layers.*.down": "rowwise"}


def classified(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


def vit_weights() -> Any:
    """Losses, norms and weights of a ViT beside one process on all rows, by optimizer; and on half of the rows."""
    mesh = two_by_two()
    row = mesh["shard"].get_local_rank()
    found: dict[str, Any] = {}
    # Some gradients, of keys' biases, are rounding errors alone: with the usual eps AdamW makes whole steps of them.
    for name, make in (("adamw", lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4)), ("sgd", sgd)):
        torch.manual_seed(0)
        model, (reference, half) = ViT(), (ViT(), ViT())
        for one in (reference, half):
            one.load_state_dict(model.state_dict())
        sharded = compile_sharded(model, make(model), loss=classified, mesh=mesh, policy=replace(EAGER, tp=VIT))
        runs: list[Any] = [([], [], {})] + [([], [], one.state_dict()) for one in (reference, half)]
        optimizers = make(reference), make(half)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            images, labels = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(10, (4,), generator=generator)
            runs[0][0].append(sharded.step(images.chunk(2)[row], labels.chunk(2)[row]).item())
            runs[0][1].append(sharded.grad_norm.item())
            for one, optimizer, run, rows in zip((reference, half), optimizers, runs[1:], (4, 2), strict=True):
                optimizer.zero_grad()
                loss = classified(one, images[:rows], labels[:rows])
                loss.backward()
                run[0].append(loss.item())
                run[1].append(nn.utils.clip_grad_norm_(one.parameters(), 1e9).item())
                optimizer.step()
        runs[0] = (*runs[0][:2], sharded.full_state_dict())
        found[name] = [compare(runs[0], other) for other in runs[1:]]
    return found


def vit() -> Any:
    """`value_and_grad` of a ViT that patterns cut: each rank's gradients are parts of the true ones."""
    mesh = two_by_two()
    torch.manual_seed(0)
    model = ViT()
    reference = ViT()
    reference.load_state_dict(model.state_dict())
    sharded = compile_sharded(model, loss=classified, mesh=mesh, policy=replace(EAGER, tp=VIT))
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(4)
    row, place = mesh["shard"].get_local_rank(), mesh["tp"].get_local_rank()
    _, gradients = sharded.value_and_grad(images.chunk(2)[row], labels.chunk(2)[row])
    classified(reference, images, labels).backward()
    own = dict(reference.named_parameters())
    apart, cuts, other = 0.0, 0, 0.0
    for buffer in sharded.plan.buffers:
        for slot in buffer.slots:
            whole = own[slot.name].grad
            assert whole is not None
            parts = [whole, whole]
            if slot.leaf.tp is not None and slot.leaf.tp.dim is not None:
                cuts += 1
                parts = list(whole.chunk(2, slot.leaf.tp.dim))
            own = sharded.plan.part(buffer, slot, row, cut=True)
            for part, mine in ((parts[place], True), (parts[1 - place], False)):
                expected = part.flatten()[own.first : own.last]
                far = (gradients[slot.name] - expected).abs().max().item() if expected.numel() else 0.0
                apart, other = (max(apart, far), other) if mine else (apart, max(other, far))
    return {"apart": apart, "other parts": other, "cuts": cuts}
