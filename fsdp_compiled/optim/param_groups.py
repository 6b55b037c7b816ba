"""What a param group says: which hyperparameters may change from step to step, and what a traced rule depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Where schedulers note their bounds; no optimizer's step reads them, but for its own ``max_lr`` where it has one.
NOTES = ("initial_lr", "min_lr", "base_momentum", "max_momentum")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's hyperparameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def scheduled(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The hyperparameters that may change from step to step: the rate, and what cyclic schedulers drive with it."""
    names = ["lr"] if "lr" in group else []
    if "max_momentum" in group:  # OneCycleLR and CyclicLR note their bounds in the group
        names.append("momentum" if "momentum" in group else "beta1")
    return tuple(names)


def hyper_of(group: Mapping[str, Any], name: str) -> Any:
    """A scheduled hyperparameter as the group has it: a number or a tensor."""
    return group["betas"][0] if name == "beta1" else group[name]


def hyper(group: Mapping[str, Any], name: str) -> float:
    """The current value of a scheduled hyperparameter."""
    return float(hyper_of(group, name))


def with_hyper(group: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The group's options, with another value for one hyperparameter."""
    return {**group, **({"betas": (value, *group["betas"][1:])} if name == "beta1" else {name: value})}


def numbers_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The group's numbers, by name, those in tuples too."""
    found: dict[str, float] = {}
    for name, value in options_of(group).items():
        for place, one in enumerate(value) if isinstance(value, tuple) else ((None, value),):
            if isinstance(one, bool | int | float):
                found[name if place is None else f"{name}[{place}]"] = float(one)
    return found


def with_numbers(group: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """The group's options with these numbers in place of its own; the names are those of `numbers_of`."""

    def one(name: str, value: Any) -> Any:
        new = values.get(name)
        if new is None or not isinstance(value, bool | int | float | torch.Tensor) or value == new:
            return value
        if isinstance(value, torch.Tensor):
            return torch.full_like(value, new)
        return type(value)(new) if type(value)(new) == new else new

    return {
        name: tuple(one(f"{name}[{place}]", item) for place, item in enumerate(value)) if type(value) is tuple
        else one(name, value)
        for name, value in options_of(group).items()
    }  # fmt: skip


def signature(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a traced rule depends on: every hyperparameter that is not scheduled, and the sign of momentum."""
    moving = scheduled(group)
    notes = (*NOTES, *(["max_lr"] if "initial_lr" in group and "min_lr" in group else []))
    fixed = []
    for name, value in sorted(options_of(group).items()):
        if name in notes or name in moving:
            continue
        fixed.append((name, value[1:] if name == "betas" and "beta1" in moving else value))
    return (
        *((name, repr(value)) for name, value in fixed),
        *((name, (hyper(group, name) > 0) - (hyper(group, name) < 0)) for name in moving if name != "lr"),
    )
