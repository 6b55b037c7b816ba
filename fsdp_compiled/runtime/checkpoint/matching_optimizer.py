"""An optimizer's state in a checkpoint beside the optimizer that loads it; of a rule, all of it fits or nothing."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Buffer, Slot
from fsdp_compiled.runtime.checkpoint import owned_state
from fsdp_compiled.runtime.checkpoint.contents import OWNED, class_name
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.match import Match, saved_names, unlike
from fsdp_compiled.runtime.checkpoint.matching_options import match_options
from fsdp_compiled.runtime.checkpoint.stretches import parameter_name, per_element, state_name
from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.checkpoint.values import decode
from fsdp_compiled.runtime.param_step_counts import Numbers, of_group, parted


def match_optimizer(manifest: Manifest, trained: Trained, places: dict[str, str], found: Match) -> None:
    """What fits of it, into ``found``; ``places``: by our name of a tensor, the saved one, to which those of a traced
    update's state are added."""
    if trained.optimizer is None or not _same_optimizer(manifest, trained, found):
        return
    _by_rules(manifest, trained, trained.optimizer, places, found)


def _same_optimizer(manifest: Manifest, trained: Trained, found: Match) -> bool:
    """Whether its state can be compared further."""
    assert trained.optimizer is not None
    if "optimizer" not in manifest.values:
        found.differences.append("the checkpoint has no optimizer's state: it was saved without an optimizer")
        return False
    saved = manifest.values["optimizer"]["same"]
    if (own := class_name(trained.optimizer)) != saved["class"] and saved["class"] is not None:
        found.differences.append(f"the optimizer is {own} here, and {saved['class']} in the checkpoint")
        return False
    if "eager" in manifest.values:
        found.differences.append(
            f"the state of {own} was saved by a version that ran it on parts of parameters, in a form of its own"
        )
        return False
    return True


def _by_rules(manifest: Manifest, trained: Trained, optimizer: Optimizer, places: dict[str, str], found: Match) -> None:
    """A rule's state is loaded whole or not at all: half of it would be another optimizer's."""
    plan, state, rules, updates = trained.plan, trained.state, trained.rules, trained.updates
    for one in manifest.values.get("owners", {}).get("same", []):
        found.written = (*found.written, *one["written"])
    match_options(manifest, plan, optimizer, rules, manifest.values["optimizer"]["same"], found)
    there = _Records(manifest)
    foreign = "owners" not in manifest.values  # or it had no whole parameters
    if foreign and updates:
        manifest.values["owners"] = {"same": [{"written": [], "attributes": {}} for _ in updates]}
    idle = [slot for buffer in plan.buffers if not buffer.updated for slot in buffer.slots]
    found.differences += _not_updated(idle, {*there.of, *there.states}, manifest)
    for rule in rules:
        members = [(slot, b) for b in plan.buffers if _updates(rule, b) for slot in b.slots]
        fits, problems, records = {}, [], {}
        for slot, buffer in members:
            if parameter_name(slot) not in places:
                continue
            first = next(iter(saved_names(manifest, slot.leaf.names)))
            if (record := there.of.get(first)) is None:
                problems.append(f"the checkpoint has no optimizer's state of {slot.name}")
                continue
            records[slot.name] = there.records[record]["scalars"]
            for name in per_element(buffer, rules):
                saved_name = f"optimizer.state.{first}.{name}"
                dtype = state.optimizer[f"{buffer.key}.{name}"].dtype
                if saved_name not in manifest.tensors:
                    problems.append(f"the optimizer's {name} of {slot.name} is not in the checkpoint")
                elif (reason := unlike(manifest, saved_name, slot.leaf.whole_shape, dtype)) is not None:
                    problems.append(f"the optimizer's {name} of {slot.name} {reason}")
                else:
                    fits[state_name(slot, name)] = saved_name
            wanted = set(per_element(buffer, rules))
            problems += [
                f"the optimizer keeps no {name} of {slot.name}"
                for name in sorted(there.states.get(first, set()) - wanted)
                if not (rule.whole and foreign)
            ]
        if lost := [slot.name for slot, _ in members if parameter_name(slot) not in places]:
            problems.append(f"the optimizer's state of group {rule.group} is of other parameters ({lost[0]} is new)")
        if rule.whole and foreign:
            firsts = {slot.name: first for slot, _ in members for first in saved_names(manifest, slot.leaf.names)}
            problems += owned_state.from_tensors(manifest, firsts, there.states, updates)
        stepped, numbers = of_group(rule, {name: _decoded(one) for name, one in records.items()})
        problems += _scalars(rule, numbers.values())
        if problems:
            found.differences += [*problems, *_left(f"group {rule.group}", records)]
        elif records:
            places |= fits
            found.owned |= {
                slot.name: OWNED + next(iter(saved_names(manifest, slot.leaf.names)))
                for slot, _ in members
                if rule.whole
            }
            found.scalars[rule.key], found.updated[rule.key] = records[next(iter(numbers))], stepped


def _left(group: str, names: Iterable[str]) -> list[str]:
    """What follows for parameters whose own state would fit: a group has one count of steps."""
    every = ", ".join(names)
    return (
        [f"so the optimizer's state of {group} is not loaded, that of these parameters too: {every}"] if every else []
    )


def _not_updated(slots: Iterable[Slot], saved: Container[str], manifest: Manifest) -> list[str]:
    """What the checkpoint has of the optimizer's for parameters that it does not update here."""
    return [
        f"the checkpoint has the optimizer's state of {slot.name}, which is not updated here"
        for slot in slots
        if any(name in saved for name in saved_names(manifest, slot.leaf.names))
    ]


def _updates(rule: Rule, buffer: Buffer) -> bool:
    return buffer.updated and buffer.group == rule.group


class _Records:
    """What was saved of the optimizer, by parameter."""

    def __init__(self, manifest: Manifest) -> None:
        self.records: list[dict[str, Any]] = manifest.values["scalars"]["same"]
        self.of = {name: index for index, record in enumerate(self.records) for name in record["parameters"]}
        self.states: dict[str, set[str]] = {}
        for key in manifest.tensors:
            if key.startswith("optimizer.state."):
                parameter, name = key.removeprefix("optimizer.state.").rsplit(".", 1)
                self.states.setdefault(parameter, set()).add(name)


def _decoded(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: decode(value, {}) for name, value in numbers.items()}


def _scalars(rule: Rule, rows: Collection[Numbers]) -> list[str]:
    """Why these saved numbers are not those that the rule starts from."""
    wanted = {entry.name for entry in rule.state if entry.scalar}
    problems = []
    for own in rows:
        if odd := wanted ^ set(own):
            names = ", ".join(sorted(odd))
            problem = f"the optimizer's {names} of group {rule.group} is only in one of checkpoint and optimizer"
            problems += [problem] * (problem not in problems)
    if parted(rows):
        problems.append(
            f"the parameters of group {rule.group} are of different age in the checkpoint (their step counts differ): "
            "they were in groups of their own"
        )
    return problems
