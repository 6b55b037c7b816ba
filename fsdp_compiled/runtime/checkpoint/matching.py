"""What of a checkpoint fits the `Sharded` that loads it, and in words what does not.

Parameters, buffers and the optimizer's state are compared by name, shape and dtype, and groups by their options. Of an
optimizer's rule all of the state fits or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.optimizer_copy import IMPLEMENTATIONS
from fsdp_compiled.optim.param_groups import NOTES, options_of, scheduled
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.runtime.checkpoint import owned_state
from fsdp_compiled.runtime.checkpoint.chunks import (
    Chunk,
    Place,
    held,
    parameter_name,
    per_element,
    split_state_name,
    state_name,
)
from fsdp_compiled.runtime.checkpoint.contents import OWNED, Trained, class_name, plain
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.values import decode, encode
from fsdp_compiled.runtime.param_step_counts import Names, Numbers, of_group, parted
from fsdp_compiled.runtime.state import State

SHOWN = 20  # differences in one message
FITS = "Build what was saved, or pass strict=False, which loads what fits and leaves the rest as it is."


@dataclass
class Match:
    """What fits. ``wanted``: what is read into this rank's shards. ``scalars``: by a rule's key, its numbers."""

    wanted: list[Chunk] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    owned: dict[str, str] = field(default_factory=dict)  # by parameter, the value that is its optimizer's state
    buffers: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] | None = None  # of each group, as JSON, where rates are taken over
    updated: dict[str, Names] = field(default_factory=dict)  # by rules' keys, who has made their steps
    written: Sequence[str] = ()  # options that the optimizer's own code writes, which are taken over too
    local: bool = False  # whether a rank goes on from what it had of local steps
    differences: list[str] = field(default_factory=list)


def saved_names(manifest: Manifest, names: Sequence[str]) -> set[str]:
    """Under which first names these names of one parameter were saved."""
    firsts = {manifest.aliases.get(name, name) for name in names}
    return {name for name in firsts if f"model.{name}" in manifest.tensors}


def unlike(manifest: Manifest, name: str, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    entry = manifest.tensors[name]
    if (entry.shape, entry.dtype) == (tuple(shape), dtype):
        return None
    return f"is {_kind(dtype, shape)} here, and {_kind(entry.dtype, entry.shape)} in the checkpoint"


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def refusal(what: str, differences: Sequence[str], cure: str = FITS) -> str:
    """The message for what does not fit."""
    lines = [f"  {line}" for line in differences[:SHOWN]]
    if len(differences) > SHOWN:
        lines.append(f"  ... and {len(differences) - SHOWN} more")
    return "\n".join([f"{what}, so nothing was loaded:", *lines, cure])


def match_options(
    manifest: Manifest, plan: Plan, optimizer: Optimizer, rules: Sequence[Rule], saved: dict[str, Any], found: Match
) -> None:
    """What the checkpoint has of each group's options: those of its parameters, in whichever groups they were."""
    counted = {(rule.group, entry.name) for rule in rules for entry in rule.state if entry.place == "group"}
    names = {slot.name: slot.leaf.names for buffer in plan.buffers for slot in buffer.slots}
    group_of = {name: index for index, row in enumerate(saved["parameters"]) for name in row}
    rows: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        before: dict[str, Any] | None = None
        for parameter in group["params"]:
            known = [group_of[name] for name in _aliased(manifest, names[parameter._sharded_name]) if name in group_of]
            if not known:
                continue
            options = saved["groups"][known[0]]
            if before is not None and options != before:
                odd = sorted(name for name in {*options, *before} if options.get(name) != before.get(name))
                found.differences.append(
                    f"the optimizer's group {index} is of parameters that had another {', '.join(odd)} each in the "
                    "checkpoint"
                )
                return
            before = options
        rows.append(before or {})
        for name, value in options_of(group).items():
            taken = (*taken_over(group), *found.written)
            if before is None or name not in before or name in IMPLEMENTATIONS or (index, name) in counted:
                continue
            if name in taken and (not _is_number(plain(value)) or _is_number(decode(before[name], {}))):
                continue
            try:
                equal = encode(plain(value), name, {}) == before[name]
            except ValueError:
                continue
            if not equal:
                found.differences.append(
                    f"the optimizer's param_groups[{index}][{name!r}] is {value!r} here, and "
                    f"{decode(before[name], {})!r} in the checkpoint"
                )
                return
    found.options = rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _aliased(manifest: Manifest, names: Sequence[str]) -> list[str]:
    """The names under which a parameter may have been saved."""
    return [*names, *(manifest.aliases[name] for name in names if name in manifest.aliases)]


def taken_over(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that a load takes from the checkpoint: those that change while one trains."""
    moving = scheduled(group)
    return (*moving, *NOTES, "max_lr", *["betas"] * ("beta1" in moving))


def write_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], written: Sequence[str] = ()) -> None:
    """Takes the rates over, what schedulers note beside them, and options that the optimizer's code writes."""
    for group, before in zip(optimizer.param_groups, saved, strict=True):
        for name in (*taken_over(group), *written):
            if name in before and isinstance(group.get(name), torch.Tensor):
                group[name].fill_(before[name])
            elif name in before:
                group[name] = before[name]
            elif name in written:
                group.pop(name, None)


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
            if (of := split_state_name(key)) is not None:
                self.states.setdefault(of[0], set()).add(of[1])


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


def match(manifest: Manifest, trained: Trained, place: Place) -> Match:
    """What of the checkpoint fits this model and optimizer, and what does not, on each side.

    ``wanted`` is what the rank at this place holds.
    """
    plan, state, rules = trained.plan, trained.state, trained.rules
    found = Match()
    places = _parameters(manifest, plan, state.buffers, found)
    match_optimizer(manifest, trained, places, found)
    for one in held(plan, rules, place, state.parameters, state.optimizer):
        if one.name in places:
            found.wanted.append(replace(one, name=places[one.name]))
    _buffers(manifest, state, found)
    _constants(manifest, state, found)
    return found


def _parameters(manifest: Manifest, plan: Plan, buffers: Iterable[str], found: Match) -> dict[str, str]:
    """By our name of a tensor, the saved one that fits it, for parameters."""
    places: dict[str, str] = {}
    used: set[str] = set()
    for slot in (slot for buffer in plan.buffers for slot in buffer.slots):
        saved = saved_names(manifest, slot.leaf.names)
        used |= saved
        if not saved:
            found.differences.append(f"{slot.name} is not in the checkpoint")
        elif len(saved) > 1:
            found.differences.append(f"{' and '.join(sorted(saved))} are one parameter here, and two in the checkpoint")
        elif (reason := unlike(manifest, _saved_as(saved), slot.leaf.whole_shape, slot.leaf.dtype)) is not None:
            found.differences.append(f"{slot.name} {reason}")
        else:
            places[parameter_name(slot)] = _saved_as(saved)
    saved_parameters = {name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")}
    # Other formats do not tell parameters and buffers apart, and have a tied one under each of its names.
    saved_parameters -= used | set(buffers) | {name for name, first in manifest.aliases.items() if first in used}
    found.differences += [f"{name} is not in the model" for name in sorted(saved_parameters)]
    return places


def _saved_as(names: set[str]) -> str:
    return f"model.{next(iter(names))}"


def _buffers(manifest: Manifest, state: State, found: Match) -> None:
    saved = {name.removeprefix("buffer ") for name in manifest.values if name.startswith("buffer ")}
    for name, tensor in state.buffers.items():
        value = buffer_value(manifest, name)
        if value is None:
            found.differences.append(f"the buffer {name} is not in the checkpoint")
            continue
        tree = value["same"] if "same" in value else value["by_rank"][0]
        if (reason := unlike(manifest, tree["$tensor"], tensor.shape, tensor.dtype)) is not None:
            found.differences.append(f"the buffer {name} {reason}")
        else:
            found.buffers.append(name)
    found.differences += [f"the buffer {name} is not in the model" for name in sorted(saved - set(state.buffers))]


def _constants(manifest: Manifest, state: State, found: Match) -> None:
    """Those that no program reads yet are compared when one does."""
    for key, value in manifest.values.items():
        kind, _, name = key.partition(" ")
        if kind != "constant":
            continue
        own, tree = state.constants.get(name), value["same"] if "same" in value else value["by_rank"][0]
        if own is not None and (reason := unlike(manifest, tree["$tensor"], own.shape, own.dtype)) is not None:
            found.differences.append(f"the tensor {name} that the loss updates {reason}")
        else:
            found.constants.append(name)


def buffer_value(manifest: Manifest, name: str) -> dict[str, Any] | None:
    """What is saved of a buffer; in what was converted it may stand among the parameters."""
    if f"buffer {name}" not in manifest.values and f"model.{name}" in manifest.tensors:
        return {"same": {"$tensor": f"model.{name}"}}
    return manifest.values.get(f"buffer {name}")
