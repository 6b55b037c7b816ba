"""Checks that all parameters of a group have made the steps that their group counts.

PyTorch's optimizers count each parameter's own steps, and a parameter without a gradient makes none. Here a group has
one count (`optim.rule.StateTensor.scalar`), so all of its parameters that are updated at all must make the same steps.
A step that would break this raises an error before anything is changed: with the wrong count its update would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.capture.side_effects import some
from fsdp_compiled.distributed.mesh import Unanimous
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Plan

Names = frozenset[str]
Numbers = Mapping[str, float]  # of one parameter, by name


@dataclass
class StepCounts:
    """``updated``: by a rule's key, the parameters that have made the rule's steps; a rule without steps has no entry.
    ``added``: the parameters that have gradients in the sums of microbatches."""

    updated: dict[str, Names] = field(default_factory=dict)
    added: Names = frozenset()

    def check(self, reached: Mapping[str, Names], rules: Sequence[Rule]) -> None:
        """Raises ``ValueError``, on every rank, if a step of these parameters would give a group unequal counts."""
        for key, names in reached.items():
            before = self.updated.get(key)
            if before is not None and before != names:
                raise Unanimous(_refusal(next(rule for rule in rules if rule.key == key), before, names))

    def left(self, rule: Rule, names: Collection[str]) -> Names:
        """Those of a rule's parameters that have not made its steps."""
        return frozenset(names) - self.updated[rule.key] if rule.key in self.updated else frozenset()

    def stepped(self, reached: Mapping[str, Names]) -> None:
        self.updated.update(reached)
        self.added = frozenset()

    def loaded(self, updated: Mapping[str, Names]) -> None:
        """Takes the counts of these rules from a checkpoint."""
        self.updated = {key: names for key, names in (self.updated | dict(updated)).items() if names}

    @property
    def value(self) -> tuple[Any, ...]:
        """The counts, as part of a pytree's structure."""
        updated = tuple((key, tuple(sorted(names))) for key, names in sorted(self.updated.items()))
        return updated, tuple(sorted(self.added))

    @staticmethod
    def of_value(value: Any) -> StepCounts:
        updated, added = value
        return StepCounts({key: frozenset(names) for key, names in updated}, frozenset(added))


def _refusal(rule: Rule, before: Names, now: Names) -> str:
    first, left = now - before, before - now
    what = [f"updates {some(sorted(first))} for the first time, after steps of others"] * bool(first)
    what += [f"does not reach {some(sorted(left))}, which made the steps before"] * bool(left)
    return (
        f"{rule.name} counts the steps of each parameter, and group {rule.group} has one count for all of its own. "
        f"This step {', and '.join(what)}, so nothing was updated. Put parameters that only some steps reach into "
        "param groups of their own, before compile_sharded; or train them in a loop of your own (fully_shard), "
        "which counts for each."
    )


def names_of(plan: Plan, rule: Rule) -> list[str]:
    """The parameters that a rule updates."""
    buffers = (buffer for buffer in plan.buffers if buffer.updated and buffer.group == rule.group)
    return [slot.name for buffer in buffers for slot in buffer.slots]


def reached_by(idle: Collection[str], plan: Plan, rules: Iterable[Rule]) -> dict[str, Names]:
    """By a rule's key, its parameters that are not idle. Rules that count no steps, or have no such parameters, are
    left out."""
    left = frozenset(idle)
    found = {rule.key: frozenset(names_of(plan, rule)) - left for rule in rules if rule.counts}
    return {key: names for key, names in found.items() if names}


def fresh(rule: Rule) -> dict[str, float]:
    """The numbers of a parameter of this rule that has made no step."""
    return {entry.name: 1.0 if entry.place == "ours" else entry.initial for entry in rule.numbers}


def aged(rule: Rule, numbers: Mapping[str, Numbers]) -> Names:
    """The parameters that have made steps. ``numbers``: each parameter's own, by name."""
    begin = fresh(rule)
    return frozenset(
        name for name, own in numbers.items() if any(own[key] != begin[key] for key in begin.keys() & own.keys())
    )


def of_group(rule: Rule, rows: Mapping[str, Numbers]) -> tuple[Names, dict[str, Numbers]]:
    """The parameters of a rule that have made steps, and the rows that are the group's numbers and so must agree:
    those of these parameters, or all if none made a step. ``rows``: each one's numbers, by name."""
    stepped = aged(rule, rows) if rule.counts else frozenset()
    return stepped, {name: own for name, own in rows.items() if name in stepped} or dict(rows)


def brought_by(optimizer: Optimizer | None, model: nn.Module, plan: Plan, rules: Iterable[Rule]) -> StepCounts:
    """The counts of an optimizer that may have made steps. ``model``: as it is before it is taken over."""
    if optimizer is None or not optimizer.state:
        return StepCounts()
    names: dict[Any, str] = {parameter: name for name, parameter in named_parameters(model)}
    stepped = {names[key] for key, kept in optimizer.state.items() if key in names and _has_stepped(kept)}
    found = {rule.key: frozenset(names_of(plan, rule)) & stepped for rule in rules if rule.counts}
    return StepCounts({key: those for key, those in found.items() if those})


def _has_stepped(kept: Any) -> bool:
    """Whether the state shows a step. State may also come from the constructor, as Adagrad's does."""
    if not isinstance(kept, Mapping) or all(value is None for value in kept.values()):
        return False
    return "step" not in kept or float(kept["step"]) != 0
