"""A sharded program on several simulated ranks trains as eager PyTorch does on the mean of the ranks' gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

from tests import models
from tests.beside_eager import CLOSE, SHARDS, _mean, both, eager, furthest, policy, three_blocks
from tests.chosen import chosen, examples
from tests.models import BLOCKS, Block, Recipe
from tests.recipes import trained
from tests.simulate import simulate

MESHES = ((2, 1), (3, 1), (4, 1), (2, 2))  # shard x replicate

KINDS = (
    "attention",
    "dropped",
    "normed",
    "mixed",
    "tied inside",
    "unreached",
)  # others are in test_shape and generated
# Each placement and each mesh, those that reduce over one axis and over two.
SOME = [("zero3", (2, 1)), ("zero3", (2, 2)), ("zero2", (3, 1)), ("zero1", (4, 1)), ("ddp", (2, 2)), ("ddp", (2, 1))]


@pytest.mark.parametrize(("shard", "mesh"), chosen(itertools.product(SHARDS, MESHES), SOME, ids=str))
def test_training_is_bit_for_bit_eager_training_on_the_mean_gradient(shard: str, mesh: tuple[int, int]) -> None:
    recipe = three_blocks(shard, mesh, optimizer="adamw", tied_head=True)
    simulation, reference = both(recipe)
    assert all(map(torch.equal, simulation.losses, reference.losses))
    for name, value in simulation.parameters.items():
        assert torch.equal(value, reference.parameters[name]), name
    error = furthest(simulation, reference)
    assert error < CLOSE  # the norms, whose order of summation is another


@pytest.mark.parametrize("shard", SHARDS)
def test_clipping_scales_by_the_global_norm(shard: str) -> None:
    recipe = replace(three_blocks(shard, (3, 1)), policy=policy(shard, clip=0.05), groups="two")
    simulation, reference = both(recipe)
    assert min(simulation.norms) > 0.05, "nothing was clipped"
    error = furthest(simulation, reference)
    assert error < CLOSE


@pytest.mark.parametrize("kind", chosen(BLOCKS, KINDS))
def test_every_kind_of_block_trains_as_in_eager(kind: str) -> None:
    error = furthest(*both(Recipe((Block(kind), Block("linear")), policy=policy("zero3"), units="pattern"), steps=2))
    assert error < CLOSE


# An example takes more than a second, so shrinking a failure would take minutes; recipes are small as they are.
@settings(
    max_examples=examples(4, 10),
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(models.recipes())
def test_generated_models_train_as_in_eager(recipe: Recipe) -> None:
    simulation, reference = both(recipe, steps=2)
    error = furthest(simulation, reference)
    assert error < CLOSE
    assert not any(free.any() for free in simulation.padding), "padding became something else than zero"


@pytest.mark.parametrize(("shard", "mesh"), [("zero3", (3, 1)), ("zero2", (2, 2)), ("zero1", (2, 1)), ("ddp", (2, 1))])
def test_gradients_are_the_mean_over_the_ranks_in_the_place_of_their_parameters(
    shard: str, mesh: tuple[int, int]
) -> None:
    recipe = three_blocks(shard, mesh)
    simulation = trained(recipe, 1, kind="gradient")
    model, _ = models.build(recipe)
    row = models.batches(recipe, 1)[0]
    single = [torch.autograd.grad(models.loss(model, *batch), list(model.parameters())) for batch in row]
    means = {
        name: _mean(
            [_mean([mine[place] for mine in single[at : at + mesh[0]]]) for at in range(0, len(single), mesh[0])]
        )
        for place, (name, _) in enumerate(model.named_parameters())
    }
    for buffer in simulation.plan.buffers:
        values = simulation.gradients[buffer.key]
        whole = torch.cat(values[: mesh[0]]) if simulation.plan.placement.gradient else values[0]
        for slot in buffer.slots:
            assert torch.equal(whole[slot.offset : slot.end], means[slot.name].reshape(-1)), slot.name


PLACES = [("zero3", (3, 1)), ("zero2", (2, 2)), ("zero1", (2, 1)), ("ddp", (2, 1))]


@pytest.mark.parametrize(
    ("accumulate", "shard", "mesh"),
    chosen(
        [(how, *place) for how in ("shards", "full") for place in PLACES],
        [("shards", *PLACES[0]), ("shards", *PLACES[2]), ("full", *PLACES[1]), ("full", *PLACES[3])],
        ids=str,
    ),
)
def test_microbatches_add_up_to_the_mean_over_all_of_them(shard: str, mesh: tuple[int, int], accumulate: str) -> None:
    recipe = Recipe(
        (Block("dropped"), Block("normed")),
        policy=replace(policy(shard, clip=0.5), accumulate=accumulate),
        shard=mesh[0],
        replicate=mesh[1],
        units="pattern",
    )
    error = furthest(*both(recipe, steps=2, microbatches=2))
    assert error < CLOSE


def test_a_parameter_that_the_loss_never_reaches_stays_as_it_is_under_weight_decay() -> None:
    recipe = Recipe((Block("unreached"),), policy=policy("zero3"))
    model, _ = models.build(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    data = models.batches(recipe, 2)
    simulation = simulate(model, optimizer, models.loss, data, recipe.policy)
    error = furthest(simulation, eager(model, optimizer, models.loss, data, None, 2))
    assert error < CLOSE


class OnlyEmpty(nn.Module):
    """Its blocks own nothing but empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Empty() for _ in range(2))
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, *(block(x) for block in self.blocks)], 1))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Number(nn.Module):
    """Its loss may be a parameter itself, so that backward has nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + x.sum()


@pytest.mark.parametrize("kind", [OnlyEmpty, Number])
@pytest.mark.parametrize("shard", ["zero3", "ddp"])
def test_degenerate_models_train_as_in_eager(kind: type[nn.Module], shard: str) -> None:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [[(torch.randn(2, 3),) for _ in range(2)] for _ in range(2)]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = model(x)
        return value.square().mean() if value.dim() else value

    simulation = simulate(model, optimizer, loss, data, policy(shard))
    error = furthest(simulation, eager(model, optimizer, loss, data, None, 2))
    assert error < CLOSE
