"""Whole updates that one operator can do: `torch.optim`'s Adam, AdamW and SGD.

They are recognised by class and options, not by their code: a subclass, which may do anything, is traced like any other
optimizer. See `fsdp_compiled.kernels.update`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.kernels.operators import operators


@dataclass(frozen=True)
class Formula:
    """A call of an operator: ``operator(parameters, gradients, *lists, copies, lr, scalar, factor, scheduled)``.

    ``lists`` names the state per element, in order; None is a list that is empty. ``scalar`` names the group's own
    state, and ``scheduled`` the hyperparameter that takes the place of a number; None where there is none.
    """

    operator: torch._ops.OpOverload
    lists: tuple[str | None, ...]
    scalar: str | None
    scheduled: str | None
    numbers: tuple[tuple[str, Any], ...]


def formula_of(
    kind: type[Optimizer], options: Mapping[str, Any], moving: Collection[str], state: Collection[str]
) -> Formula | None:
    """``moving`` names the hyperparameters that are scheduled, ``state`` the optimizer's state."""
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        beta1, beta2 = options["betas"]
        numbers = {
            "beta1": beta1,
            "beta2": beta2,
            "eps": options["eps"],
            "weight_decay": options["weight_decay"],
            "decoupled": options["decoupled_weight_decay"],
            "maximize": options["maximize"],
        }
        operator, scalar = operators.adam_.default, "step"
        lists: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    elif kind is torch.optim.SGD:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        numbers = {name: options[name] for name in names}
        operator, lists, scalar = operators.sgd_.default, ("momentum_buffer",), "undamped"
    else:
        return None
    scheduled = next((name for name in ("beta1", "momentum") if name in moving), None)
    if not set(moving) <= {"lr", scheduled} or not all(isinstance(value, int | float) for value in numbers.values()):
        return None
    return Formula(
        operator,
        tuple(name if name in state else None for name in lists),
        scalar if scalar in state else None,
        scheduled,
        tuple((name, float(value) if type(value) is int else value) for name, value in numbers.items()),
    )
