"""Architectures written out, five steps on two simulated ranks against unsharded eager training of the same batches.

The reference is one model whose gradient is the mean over the ranks' batches; where there are statistics of a batch,
each rank has its own, as under FSDP2 and DDP.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy
from tests.chosen import chosen
from tests.simulate import Batch, Loss, simulate
from tests.toys import mse

STEPS, RANKS = 5, 2


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.skip = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.relu(self.norms[1](self.second(y)) + self.skip(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList([Residual(8, 8, 1), Residual(8, 12, 2), Residual(12, 12, 2)])
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Double(nn.Sequential):
    def __init__(self, width: int, out: int) -> None:
        super().__init__(nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (4, 6, 8)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.stem = Double(3, widths[0])
        self.down = nn.ModuleList(Double(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in reversed(pairs))
        self.merge = nn.ModuleList(Double(2 * narrow, narrow) for narrow, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(F.avg_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def waves(t: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of a time in [0, 1)."""
    rates = torch.exp(-math.log(100.0) * torch.arange(width // 2) / (width // 2))
    angles = 100.0 * t[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Modulated(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by the condition (adaLN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition)[:, None].chunk(6, -1)
        y = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y, y, need_weights=False)[0]
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class DiT(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, width) / 10)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(4, width)
        self.blocks = nn.ModuleList(Modulated(width) for _ in range(depth))
        self.head = nn.Linear(width, 12)

    def forward(self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).mT + self.position
        condition = self.time(waves(t, tokens.shape[-1])) + self.label(label)
        for block in self.blocks:
            tokens = block(tokens, condition)
        return F.pixel_shuffle(self.head(tokens).mT.unflatten(2, (4, 4)), 2)


class Messages(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.Softplus())
        self.update = nn.GRUCell(width, width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        source, target = edges
        sent = self.message(torch.cat([nodes[source], nodes[target], lengths[:, None]], -1))
        received = torch.zeros_like(nodes).index_add_(0, target, sent)
        degree = torch.zeros(len(nodes)).scatter_add_(0, target, torch.ones(target.shape)).clamp(min=1)
        return self.update(received / degree[:, None], nodes)


class GraphNetwork(nn.Module):
    """Positions of atoms and their bonds to an energy of each molecule."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, width)
        self.layers = nn.ModuleList(Messages(width) for _ in range(depth))
        self.energy = nn.Linear(width, 1)

    def forward(
        self, kinds: torch.Tensor, places: torch.Tensor, edges: torch.Tensor, molecule: torch.Tensor
    ) -> torch.Tensor:
        lengths = (places[edges[0]] - places[edges[1]]).norm(dim=-1)
        nodes = self.kinds(kinds)
        for layer in self.layers:
            nodes = layer(nodes, edges, lengths)
        return torch.zeros(3).scatter_reduce(0, molecule, self.energy(nodes)[:, 0], "mean", include_self=False)


class LowRank(nn.Module):
    """A frozen layer and a small one beside it that is trained."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + 2.0 * self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "project": LowRank(nn.Linear(width, width))})
            for _ in range(depth)
        )
        for layer in self.layers:
            layer["norm"].requires_grad_(False)
        self.head = nn.Linear(width, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer["project"](layer["norm"](x)))
        return self.head(x)


class Shared(nn.Module):
    """One layer used by itself, inside a block, and in a block of that block; a block that stands in a list twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        inner = nn.Sequential(self.layer, nn.Tanh())
        outer = nn.Sequential(inner, nn.Linear(width, width), inner)
        self.blocks = nn.ModuleList([outer, nn.Sequential(nn.Linear(width, width), inner), outer])
        self.again = nn.ModuleDict({"inner": inner, "outer": outer})
        self.head = nn.Linear(width, 3)
        self.head.bias = self.blocks[1][0].bias = nn.Parameter(torch.zeros(width))  # one parameter, two shapes of use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(self.again["outer"](x), self.head.weight, self.head.bias[:3])


def images(generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def pictures(generator: torch.Generator) -> Batch:
    return tuple(torch.randn(2, 2, 3, 8, 8, generator=generator))


def rows(generator: torch.Generator) -> Batch:
    return torch.randn(5, 8, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def noised(generator: torch.Generator) -> Batch:
    x, noise = torch.randn(2, 3, 3, 8, 8, generator=generator)
    return x, noise, torch.rand(3, generator=generator), torch.randint(0, 4, (3,), generator=generator)


def molecules(generator: torch.Generator) -> Batch:
    molecule = torch.arange(3).repeat_interleave(4)  # three of four atoms
    edges = torch.randint(0, 4, (2, 20), generator=generator) + 4 * torch.randint(0, 3, (20,), generator=generator)
    kinds = torch.randint(0, 5, (12,), generator=generator)
    energies = torch.randn(3, generator=generator)
    return kinds, torch.randn(12, 3, generator=generator), edges, molecule, energies


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def denoise(
    model: nn.Module, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor, label: torch.Tensor
) -> torch.Tensor:
    share = t[:, None, None, None]
    return F.mse_loss(model((1 - share) * x + share * noise, t, label), noise - x)


def energy(model: nn.Module, *graph: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(*graph[:-1]), graph[-1])


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Loss
    units: int


CASES = {
    "ResNet": Case(ResNet, images, classify, 4),
    "U-Net": Case(UNet, pictures, mse, 7),
    "diffusion transformer": Case(DiT, noised, denoise, 3),
    "graph network": Case(GraphNetwork, molecules, energy, 3),
    "LoRA": Case(Adapted, rows, classify, 4),
    "shared modules": Case(Shared, rows, classify, 2),
}


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)


def unsharded(
    model: nn.Module, loss: Loss, batches: list[list[Batch]], lr: float = 0.05
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Weights, and each rank's module buffers, after training on the mean of the ranks' gradients."""
    optimizer = sgd(model, lr)
    statistics = [{name: value.clone() for name, value in model.named_buffers()} for _ in range(RANKS)]
    for ranks in batches:
        optimizer.zero_grad()
        for mine, batch in zip(statistics, ranks, strict=True):
            model.load_state_dict(mine, strict=False)
            (loss(model, *batch) / RANKS).backward()
            mine |= {name: value.clone() for name, value in model.named_buffers()}
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, statistics


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(((found[name] - value).norm() / (value.norm() + 1e-6)).item() for name, value in wanted.items())


@pytest.mark.parametrize("name", chosen(CASES, ["ResNet", "diffusion transformer", "LoRA", "shared modules"]))
def test_it_trains_on_two_ranks_as_unsharded(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    start = {key: value.clone() for key, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    batches = [[case.batch(generator) for _ in range(RANKS)] for _ in range(STEPS)]
    weights, statistics = unsharded(copy.deepcopy(model), case.loss, batches)
    others, _ = unsharded(copy.deepcopy(model), case.loss, batches, lr=0.0501)
    policy = Policy(lower="eager", bucket_mb=0)
    simulation = simulate(model, sgd(model), case.loss, batches, policy)
    assert furthest(simulation.parameters, weights) < 1e-5
    assert furthest(others, weights) > 1e-5  # control
    for found, wanted in zip(simulation.buffers, statistics, strict=True):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
    assert len(simulation.plan.units) == case.units and simulation.program.marked("gather")
    for key, parameter in model.named_parameters():
        assert torch.equal(simulation.parameters[key], start[key]) == (not parameter.requires_grad), key


def test_ranks_have_statistics_of_their_own() -> None:
    """So that the comparison above can tell local statistics from shared ones."""
    case = CASES["ResNet"]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    _, (first, second) = unsharded(
        case.build(), case.loss, [[case.batch(generator) for _ in range(RANKS)] for _ in range(STEPS)]
    )
    assert not torch.allclose(first["stem.1.running_mean"], second["stem.1.running_mean"], rtol=1e-3)
