"""What several simulated ranks train, beside one process in eager PyTorch that knows all of their batches."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compiled import Policy
from tests import models
from tests.models import Block, Recipe
from tests.recipes import trained
from tests.simulate import Batch, Simulation, noise

SHARDS = ("zero3", "zero2", "zero1", "ddp")
CLOSE = 1e-6  # relative, by tensor norm; what sums in another order cost in float32
WRONG = 1e-4  # what a broken program must be off by, at the least


@dataclass
class Eager:
    """What one process holds that knows every rank's batch."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: list[dict[str, torch.Tensor]]


def eager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Any,
    batches: Sequence[Sequence[Batch]],
    clip: float | None,
    shard: int,
    microbatches: int = 1,
) -> Eager:
    """Plain autograd on each rank's batch, with that rank's dropout masks and module buffers; the mean; one update.

    The mean is taken as the collectives take it: over the shard axis, then over the replicas, then over microbatches.
    """
    model, optimizer = copy.deepcopy((model, optimizer))
    world = len(batches[0])
    locals_ = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in range(world)]
    states = [noise(rank) for rank in range(world)]
    owned = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    found = Eager([], [], {}, locals_)

    def differentiate(rank: int, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        for name, buffer in model.named_buffers():
            buffer.copy_(locals_[rank][name])
        optimizer.zero_grad()
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(states[rank])
            value = loss(model, *batch)
            value.backward()
            states[rank] = torch.get_rng_state()
        for name, buffer in model.named_buffers():
            locals_[rank][name].copy_(buffer)
        return value.detach(), [None if p.grad is None else p.grad.clone() for p in owned]

    for first in range(0, len(batches), microbatches):
        losses, means = [], []
        for row in batches[first : first + microbatches]:
            single = [differentiate(rank, batch) for rank, batch in enumerate(row)]
            losses += [value.double() for value, _ in single]
            means.append([_over_ranks([mine[place] for _, mine in single], shard) for place in range(len(owned))])
        found.losses.append(_mean(losses).to(single[0][0].dtype))
        for parameter, *gradients in zip(owned, *means, strict=True):
            parameter.grad = None if gradients[0] is None else _mean(gradients)
        given = [parameter.grad for parameter in owned if parameter.grad is not None]
        norm = torch.stack([gradient.double().square().sum() for gradient in given]).sum().sqrt().float()
        found.norms.append(norm)
        if clip is not None:
            for gradient in given:
                gradient.mul_((clip / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))
        optimizer.step()
    found.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


def _over_ranks(values: Sequence[torch.Tensor | None], shard: int) -> torch.Tensor | None:
    if values[0] is None:
        return None
    return _mean([_mean(values[start : start + shard]) for start in range(0, len(values), shard)])


def _mean(values: Sequence[Any]) -> torch.Tensor:
    return functools.reduce(operator.add, values) / len(values)


def both(recipe: Recipe, steps: int = 3, microbatches: int = 1, **how: Any) -> tuple[Simulation, Eager]:
    """The program on simulated ranks, and the reference, from the same start."""
    model, optimizer = models.build(recipe)
    data = models.batches(recipe, steps * microbatches)
    reference = eager(model, optimizer, models.loss, data, recipe.policy.clip, recipe.shard, microbatches)
    return trained(recipe, steps, microbatches, **how), reference


def furthest(simulation: Simulation, reference: Eager) -> float:
    """The largest relative error of any loss, norm, parameter or buffer."""
    assert simulation.parameters.keys() == reference.parameters.keys()
    if not simulation.replicas_agree:
        return math.inf
    pairs = [
        *zip(simulation.losses, reference.losses, strict=True),
        *zip(simulation.norms, reference.norms, strict=True),
        *((value, reference.parameters[name]) for name, value in simulation.parameters.items()),
    ]
    for mine, theirs in zip(simulation.buffers, reference.buffers, strict=True):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in mine]
    return max(_error(value, expected) for value, expected in pairs)


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
    if value.numel() == 0:
        return 0.0
    scale = torch.finfo(value.dtype).eps / torch.finfo(torch.float32).eps if value.is_floating_point() else 1.0
    value, expected = value.double(), expected.double()
    return ((value - expected).norm() / expected.norm().clamp(min=1e-3)).item() / max(scale, 1.0)


def policy(shard: str, clip: float | None = None) -> Policy:
    return Policy(shard=shard, clip=clip, bucket_mb=0, lower="eager")


def three_blocks(shard: str = "zero3", mesh: tuple[int, int] = (2, 1), **options: Any) -> Recipe:
    """Blocks of one shape: their buffers could be taken for each other."""
    return Recipe((Block("linear"),) * 3, policy=policy(shard), shard=mesh[0], replicate=mesh[1], **options)
