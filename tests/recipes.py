"""What becomes of a recipe: its programs, and its training on simulated ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from fsdp_compiled import Plan, Policy, Program
from tests import models
from tests.models import Block, Recipe
from tests.simulate import Simulation, simulate, stages


def recipe(shard: str, *blocks: Block, **options: object) -> Recipe:
    """Three blocks or these, under this placement, nothing merged: every unit has its own collectives."""
    blocks = blocks or (Block("linear"),) * 3
    return Recipe(blocks, policy=Policy(shard=shard, lower="eager", bucket_mb=0), **options)  # type: ignore[arg-type]


@functools.cache
def built(what: Recipe, kind: str = "step", place: int = 0) -> tuple[tuple[Program, ...], Plan]:
    """The program after each pass, from the captured one on, as the rank at this place builds it."""
    model, optimizer = models.build(what)
    return stages(
        model, optimizer, models.loss, models.batches(what, 1)[0][place], what.policy,
        shard=what.shard, replicate=what.replicate, units=models.units(what), kind=kind, place=place,
        traced_as=None if place else _traced_as(what),
    )  # fmt: skip


def program_of(what: Recipe, kind: str = "step") -> Program:
    return built(what, kind)[0][-1]


def trained(what: Recipe, steps: int = 2, microbatches: int = 1, **how: Any) -> Simulation:
    """After so many steps; ``how`` as `simulate` has it."""
    model, optimizer = models.build(what)
    return simulate(
        model, optimizer, models.loss, models.batches(what, steps * microbatches), what.policy,
        shard=what.shard, replicate=what.replicate, units=models.units(what), microbatches=microbatches,
        traced_as=_traced_as(what), **how,
    )  # fmt: skip


def _traced_as(what: Recipe) -> Recipe:
    """The recipe without what takes no part in a trace, but for what the plan says."""
    plain = Recipe(())
    return replace(
        what, units=plain.units, groups=plain.groups, optimizer=plain.optimizer, policy=plain.policy,
        shard=plain.shard, replicate=plain.replicate,
    )  # fmt: skip
