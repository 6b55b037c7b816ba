"""A case, made of its seed alone: which model, loss, optimizer and policy, and what is done in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.parts import LATER, LATER_LAYERS, LAYERS, LOSSES, OPTIMIZERS

SCHEDULES: dict[str, Callable[[int], float]] = {
    "none": lambda step: 1.0,
    "warm-up from zero": lambda step: min(1.0, step / 3),
    "decay": lambda step: 0.8**step,
}
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"shard": "ddp"},
    {"shard": "zero1"},
    {"shard": "zero2", "accumulate": "full"},
    {"clip": 0.1},
    {"clip_value": 0.01},
    {"recompute": "unit"},
    {"recompute": "cheap"},
    {"accumulate": "full"},
    {"dynamic": True},
    {"kernels": True},
)
# What a person does between calls, and what calls there are; each with how often.
ACTIONS: dict[str, int] = {
    "step": 8,
    "microbatches": 2,
    "gradient": 2,
    "forward": 2,
    "evaluate": 2,
    "wrong batch": 1,
    "draw": 1,
    "reseed": 1,
    "rate": 1,
    "decay": 1,
    "attribute": 1,
    "branch": 1,
    "probability": 1,
    "rebind": 1,
    "write constant": 1,
    "power": 1,
    "write buffer": 1,
    "eval one": 1,
    "autocast step": 2,
    "failing loss": 1,
    "write weight": 1,
    "replace buffer": 1,
    "replace layer": 1,
    "add hook": 1,
    "float64 by default": 1,
    "inference mode": 1,
}
LATER_ACTIONS = ("late name", "late key", "write bank", "replace state", "step")


@dataclass(frozen=True)
class Case:
    seed: int
    layers: tuple[str, ...]
    loss: str
    optimizer: str
    groups: bool
    schedule: str
    policy: tuple[tuple[str, Any], ...]
    autocast: bool  # around every call
    rows: tuple[int, ...]  # of the calls, in turns
    actions: tuple[str, ...]


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    case = Case(
        seed,
        layers=tuple(rng.choice(list(LAYERS)) for _ in range(rng.randint(1, 3))),
        loss=rng.choice(LOSSES),
        optimizer=rng.choice(list(OPTIMIZERS)),
        groups=rng.random() < 0.3,
        schedule=rng.choice(list(SCHEDULES)),
        policy=tuple(rng.choice(POLICIES).items()),
        autocast=rng.random() < 0.15,
        rows=tuple(rng.choice((2, 3, 4, 5)) for _ in range(rng.randint(1, 2))),
        actions=tuple(rng.choices(list(ACTIONS), list(ACTIONS.values()), k=rng.randint(3, 6))),
    )
    if seed % 5 == 2:
        layers = (rng.choice(list(LATER_LAYERS)), *case.layers[:2])
        actions = list(case.actions)
        actions.insert(rng.randrange(1, len(actions)), rng.choice(LATER_ACTIONS))
        loss = "banks" if "bank" in layers else case.loss
        return replace(case, layers=layers, actions=(*actions, "step"), loss=loss)
    return replace(case, optimizer=rng.choice(list(LATER))) if seed % 5 == 3 else case


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""
    for index in range(len(case.actions)):
        yield replace(case, actions=case.actions[:index] + case.actions[index + 1 :])
    for index in range(len(case.layers)):
        yield replace(case, layers=case.layers[:index] + case.layers[index + 1 :])
    simple = replace(case, groups=False, schedule="none", policy=(), autocast=False, rows=case.rows[:1])
    for name in ("groups", "schedule", "policy", "autocast", "rows"):
        if getattr(case, name) != getattr(simple, name):
            yield replace(case, **{name: getattr(simple, name)})
    for name, plain in (("loss", "mse"), ("optimizer", "sgd")):
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})
