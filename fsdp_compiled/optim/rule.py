"""How one kind of parameter is updated: the optimizer's own code as a graph over flat shards.

A `Formula` is a whole update that one operator can do: that of `torch.optim`'s Adam and AdamW. They are recognised by
class and options, not by their code. A subclass may do anything, so it is traced like any other optimizer. See
`fsdp_compiled.kernels.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch.optim import Optimizer
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Formula:
    """A call: ``adam_(parameters, gradients, *lists, copies, lr, step, factor, scheduled)``.

    ``lists`` names the state per element, in order; None stands for an empty list. ``scheduled`` names the
    hyperparameter that replaces ``beta1``, if one does.
    """

    lists: tuple[str | None, ...]
    scheduled: str | None
    numbers: tuple[tuple[str, Any], ...]


def formula_of(
    kind: type[Optimizer], options: Mapping[str, Any], moving: Collection[str], state: Collection[str]
) -> Formula | None:
    """``moving`` names the hyperparameters that are scheduled, ``state`` the optimizer's state."""
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    beta1, beta2 = options["betas"]
    numbers = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": options["eps"],
        "weight_decay": options["weight_decay"],
        "decoupled": options["decoupled_weight_decay"],
        "maximize": options["maximize"],
    }
    if not set(moving) <= {"lr", "beta1"} or not all(isinstance(value, int | float) for value in numbers.values()):
        return None
    return Formula(
        tuple(name if name in state else None for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        "beta1" if "beta1" in moving else None,
        tuple((name, float(value) if type(value) is int else value) for name, value in numbers.items()),
    )


Location = Literal["parameter", "group", "optimizer", "state", "ours"]


@dataclass(frozen=True)
class StateTensor:
    """One entry of the optimizer's state: per element of the parameter, or (``scalar``) one for the whole group.

    ``place``: where the optimizer's code keeps it: in ``state[parameter]``, in the param group, as an attribute of the
    optimizer, in ``state[name]``; or nowhere, if only the traced rule needs it (``"ours"``).
    """

    name: str
    scalar: bool
    initial: float
    dtype: torch.dtype | None  # None: the parameter's
    place: Location = "parameter"
    number: type[bool | int | float] | None = None  # its type, if the code has a Python number, not a 0-d tensor
    container: str | None = None  # the name of the dictionary or list in which the code keeps it
    from_rate: bool = False  # whether the first step makes it from the rate, as with Rprop's step sizes


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps from step to step: the entries, and where its code finds them."""

    state: tuple[StateTensor, ...]
    started: tuple[str, ...]  # the parameter's state that the constructor made
    empty: tuple[str, ...] = ()  # state that holds None
    forms: tuple[tuple[str, pytree.TreeSpec], ...] = ()  # of containers in the parameter's state, by name
    before: frozenset[tuple[str, str]] = frozenset()  # place and name of other entries that are there from the start

    def is_there(self, entry: StateTensor) -> bool:
        """Whether the code finds this entry before its first step."""
        if entry.place == "parameter":
            return (entry.container or entry.name) in self.started
        return (entry.place, entry.name) in self.before


class RuleInput(NamedTuple):
    """The role of one placeholder of a rule's graph. ``name``: that of the state or hyperparameter."""

    kind: Literal["parameter", "gradient", "state", "hyper"]
    name: str = ""

    def __str__(self) -> str:
        return "_".join(filter(None, self))


def inputs_of(state: Sequence[StateTensor], hypers: Iterable[str]) -> list[RuleInput]:
    """The placeholders of a rule's graph, in order."""
    tensors = [RuleInput("state", entry.name) for entry in state]
    return [RuleInput("parameter"), RuleInput("gradient"), *tensors, *(RuleInput("hyper", name) for name in hypers)]


@dataclass(frozen=True)
class Rule:
    """How the parameters of one group are updated, in one of three ways.

    *Traced*: ``trace(numel, dtype, device)`` gives an ATen graph over a flat shard. Its placeholders are ``inputs``, in
    this order; it writes parameter and state in place. ``formula`` is the same as one operator, if there is one. *As it
    is*: ``eagerly`` says why there is no graph. The optimizer's own step runs after the program, on this rank's shards,
    or (``whole``) on whole parameters, each on the rank that owns it.
    """

    group: int
    name: str
    state: tuple[StateTensor, ...]
    hypers: tuple[str, ...]
    trace: Callable[[torch.dtype, torch.device], fx.Graph] = field(compare=False)
    formula: Formula | None = None
    nonzero: bool = False  # whether the optimizer's code fails at a rate of zero
    eagerly: str | None = None
    kept: Kept | None = field(default=None, compare=False)  # where code that runs on shards finds its state
    whole: bool = False

    @cached_property
    def inputs(self) -> list[RuleInput]:
        return inputs_of(self.state, self.hypers)

    @property
    def numbers(self) -> list[StateTensor]:
        """State that the optimizer's own code keeps for each parameter, and that a group keeps once here."""
        return [entry for entry in self.state if entry.scalar and entry.place in ("parameter", "ours")]

    @property
    def counts(self) -> bool:
        """Whether it has such numbers, and they are kept here."""
        return not self.whole and bool(self.numbers)

    @property
    def key(self) -> str:
        """The name of the group's scalar state."""
        return f"group {self.group}"


def rule_for(rules: Sequence[Rule], group: int | None) -> Rule:
    """The rule that updates a buffer of this group."""
    return next(rule for rule in rules if rule.group == group)


def eager_rule(rules: Sequence[Rule]) -> Rule | None:
    """The first rule without a graph; its optimizer runs as it is."""
    return next((rule for rule in rules if rule.eagerly is not None), None)


def described(rules: Sequence[Rule]) -> list[str]:
    """What to know of updates that run outside of the program."""
    lines = {
        f"{rule.name} updates as it is, on {'whole parameters' if rule.whole else 'shards'}, after the program, whose "
        f"CUDA graph ends with the gradients: {rule.eagerly}": None
        for rule in rules
        if rule.eagerly is not None
    }
    return list(lines)
