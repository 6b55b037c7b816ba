"""The kinds of steps that a loop is made of, by name: a table that the files beside this one fill.

A step does the same to either side, and draws its numbers from a generator that both get alike; it returns what there
is to compare beside weights, gradients, buffers and random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tests.fuzz.loops.sides import Side


@dataclass(frozen=True)
class Step:
    run: Callable[[Side, random.Random], Any]
    weight: int  # how often it is drawn
    makes_noise: bool = False  # an error leaves the generator elsewhere than plain PyTorch's


STEPS: dict[str, Step] = {}
LATER: dict[str, Step] = {}  # every third seed has some of them in the place of others


def step(weight: int = 1, makes_noise: bool = False, later: bool = False) -> Callable[[Any], Any]:
    """A kind of step, by the function's name."""

    def put(function: Callable[[Side, random.Random], Any]) -> Any:
        (LATER if later else STEPS)[function.__name__] = Step(function, weight, makes_noise)
        return function

    return put


def draw(rng: random.Random, count: int, without: Collection[str] = ()) -> list[str]:
    names = [name for name in STEPS if name not in without]
    return rng.choices(names, [STEPS[name].weight for name in names], k=count)


def with_later(names: list[str], rng: random.Random, without: Collection[str] = ()) -> list[str]:
    """Every fourth of them is another, of those that were thought of later."""
    kinds = [name for name in LATER if name not in without]
    return [rng.choice(kinds) if rng.random() < 0.25 else name for name in names]
