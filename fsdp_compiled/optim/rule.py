"""How one kind of parameter is updated: the optimizer's own code as a graph over flat shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import fx

from fsdp_compiled.optim.fused import Formula

Location = Literal["parameter", "group", "optimizer", "state", "ours"]


@dataclass(frozen=True)
class StateTensor:
    """One entry of the optimizer's state: per element of the parameter, or (``scalar``) one for the whole group.

    ``place``: where the optimizer's code keeps it: in ``state[parameter]``, in the param group, as an attribute of the
    optimizer, in ``state[name]``, or nowhere, because the traced rule needs it (``"ours"``).
    """

    name: str
    scalar: bool
    initial: float
    dtype: torch.dtype | None  # None: the parameter's
    place: Location = "parameter"
    number: bool = False  # a Python number in the optimizer's code, not a 0-d tensor
    container: str | None = None  # where the code keeps it in a dictionary or a list: that one's name


class RuleInput(NamedTuple):
    """What one placeholder of a rule's graph is; the name is that of the state or hyperparameter."""

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
    """How the parameters of one group, or those of them that are updated alike, are updated on flat shards.

    ``trace(numel, dtype, device)`` gives an ATen graph whose placeholders are ``inputs``, in this order, of which it
    writes parameter and state in place. ``formula`` is the same as one operator, where
    there is one. Rules of one group differ in their ``variant``: 0, 1, ...
    """

    group: int
    name: str
    state: tuple[StateTensor, ...]
    hypers: tuple[str, ...]
    trace: Callable[[int, torch.dtype, torch.device], fx.Graph] = field(compare=False)
    formula: Formula | None = None
    variant: int = 0
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()  # dtype and shape of the parameters it is for
    nonzero: bool = False  # whether the optimizer's code fails at a rate of zero
    eagerly: str | None = None  # why there is no graph, where the optimizer runs as it is after the program
    whole: bool = False  # and then on whole parameters, each on the rank that owns it, not on pieces of all
    apart: bool = False  # and whether its step may be called on some of these, then on the others

    @cached_property
    def inputs(self) -> list[RuleInput]:
        return inputs_of(self.state, self.hypers)

    @property
    def numbers(self) -> list[StateTensor]:
        """Those that the optimizer's own code keeps for each parameter, and a group has once here."""
        return [entry for entry in self.state if entry.scalar and entry.place in ("parameter", "ours")]

    @property
    def counts(self) -> bool:
        """Whether it has such numbers, and they are kept here."""
        return self.eagerly is None and bool(self.numbers)

    @property
    def key(self) -> str:
        """What the group's scalar state goes by: ``"group 0"``, or ``"group 0 variant 1"``."""
        return f"group {self.group}" + (f" variant {self.variant}" if self.variant else "")


def rule_for(rules: Sequence[Rule], group: int, variant: int) -> Rule:
    """The rule that updates a buffer."""
    return next(rule for rule in rules if (rule.group, rule.variant) == (group, variant))


def eager_rule(rules: Sequence[Rule]) -> Rule | None:
    """The first of which there is no graph, so that its optimizer runs as it is."""
    return next((rule for rule in rules if rule.eagerly is not None), None)
