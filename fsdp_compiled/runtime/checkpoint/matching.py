"""Matches a checkpoint with the `Sharded` that loads it, and says what does not fit.

Parameters, buffers and the optimizer's state are compared by name, shape and dtype, and groups by their options. The
state of an optimizer's rule fits as a whole or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.hyperparameters import NOTES, scheduled
from fsdp_compiled.optim.optimizer_copy import IMPLEMENTATIONS
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint import owned_state
from fsdp_compiled.runtime.checkpoint.chunks import Chunk, Entry, Place, name_of, per_element
from fsdp_compiled.runtime.checkpoint.contents import OWNED, Trained, class_name, options
from fsdp_compiled.runtime.checkpoint.manifest import Manifest, first_of
from fsdp_compiled.runtime.checkpoint.values import decode, encode, tensor_names
from fsdp_compiled.runtime.param_step_counts import Names, Numbers, of_group
from fsdp_compiled.runtime.state import State

SHOWN = 20  # differences in one message
FITS = "Build what was saved, or pass strict=False, which loads what fits and leaves the rest as it is."


log = logging.getLogger("fsdp_compiled")


@dataclass
class Match:
    """What fits. ``wanted``: what is read into this rank's shards. ``scalars``: by a rule's key, its numbers."""

    wanted: list[Chunk] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    owned: dict[str, str] = field(default_factory=dict)  # by parameter: the value that holds its optimizer's state
    buffers: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] | None = None  # of each group, as JSON, where rates are taken over
    updated: dict[str, Names] = field(default_factory=dict)  # by rule's key: the parameters that have made steps
    written: Sequence[str] = ()  # options that the optimizer's own code writes, which are taken over too
    local: bool = False  # whether the rank goes on from its saved local steps
    differences: list[str] = field(default_factory=list)


def saved_names(manifest: Manifest, names: Sequence[str]) -> set[str]:
    """The first names under which these names of one parameter were saved."""
    firsts = {manifest.aliases.get(name, name) for name in names}
    return {name for name in firsts if f"model.{name}" in manifest.tensors}


def unlike(saved: Entry, shape: Sequence[int], dtype: torch.dtype, cast: bool = False) -> str | None:
    """How a saved tensor differs, in words. ``cast``: not by a dtype of the same kind. A cast to another kind makes
    another number: whole numbers may belong to scales."""
    kind, own = ((one.is_floating_point, one.is_complex) for one in (saved.dtype, dtype))
    if saved.shape == tuple(shape) and (saved.dtype == dtype or (cast and kind == own)):
        return None
    return f"is {_kind(dtype, shape)} here, and {_kind(saved.dtype, saved.shape)} in the checkpoint"


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def refusal(what: str, differences: Sequence[str], cure: str = FITS) -> str:
    """The message for what does not fit."""
    lines = [f"  {line}" for line in differences[:SHOWN]]
    if len(differences) > SHOWN:
        lines.append(f"  ... and {len(differences) - SHOWN} more")
    return "\n".join([f"{what}, so nothing was loaded:", *lines, cure])


def report(what: str, differences: Sequence[str]) -> None:
    """Reports what was not loaded."""
    if differences:
        lines = "".join(f"\n  {line}" for line in differences)
        log.warning("loaded what fits of %s, and left the rest as it was:%s", what, lines)


def match_options(manifest: Manifest, trained: Trained, optimizer: Optimizer, found: Match) -> None:
    """Matches each group's options with those saved for its parameters, whichever groups these were in."""
    saved = manifest.values["optimizer"]["same"]
    counted = {(rule.group, entry.name) for rule in trained.rules for entry in rule.state if entry.place == "group"}
    names = {slot.name: slot.leaf.names for buffer in trained.plan.buffers for slot in buffer.slots}
    # Options that are tensors are neither compared nor taken over.
    kept = [{k: v for k, v in one.items() if not tensor_names(v)} for one in saved["groups"]]
    group_of = {name: options for options, row in zip(kept, saved["parameters"], strict=True) for name in row}
    rows: list[dict[str, Any]] = []
    fit = len(found.differences)
    for index, (group, own) in enumerate(zip(optimizer.param_groups, options(optimizer), strict=True)):
        firsts = [first for one in group["params"] for first in saved_names(manifest, names[one._sharded_name])]
        there = [group_of[first] for first in firsts if first in group_of]
        before = there[0] if there else {}
        if odd := {name for one in there for name in {*one, *before} if one.get(name) != before.get(name)}:
            found.differences.append(
                f"the optimizer's group {index} is of parameters that had another {', '.join(sorted(odd))} each in the "
                "checkpoint"
            )
            return
        rows.append(before)
        taken = (*taken_over(group), *found.written)
        for name, value in own.items():
            if name not in before or name in IMPLEMENTATIONS or (index, name) in counted:
                continue
            if name in taken and (not _is_number(value) or _is_number(decode(before[name], {}))):
                continue
            if encode(value, name, {}) != before[name]:
                found.differences.append(
                    f"the optimizer's param_groups[{index}][{name!r}] is {value!r} here, and "
                    f"{decode(before[name], {})!r} in the checkpoint"
                )
    if len(found.differences) == fit:
        found.options = rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def taken_over(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that a load takes from the checkpoint: those that change while one trains."""
    moving = scheduled(group)
    return (*moving, *NOTES, "max_lr", *["betas"] * ("beta1" in moving))


def write_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], written: Sequence[str] = ()) -> None:
    """Takes over the rates, what schedulers note beside them, and options that the optimizer's code writes."""
    for group, before in zip(optimizer.param_groups, saved, strict=True):
        for name in (*taken_over(group), *written):
            if name in before and isinstance(group.get(name), torch.Tensor):
                group[name].fill_(before[name])
            elif name in before:
                group[name] = before[name]
            elif name in written:
                group.pop(name, None)


def match_optimizer(manifest: Manifest, trained: Trained, places: dict[str, str], found: Match) -> None:
    """Adds what fits of the optimizer to ``found``. ``places``: by our name of a tensor, the saved name; a traced
    update's state is added to it. A rule's state is loaded whole or not at all: half of it would be another
    optimizer's."""
    optimizer, updates = trained.optimizer, trained.updates
    if optimizer is None:
        return
    if "optimizer" not in manifest.values:
        found.differences.append("the checkpoint has no optimizer's state: it was saved without an optimizer")
        return
    kind = manifest.values["optimizer"]["same"]["class"]
    if (own := class_name(optimizer)) != kind and kind is not None:
        found.differences.append(f"the optimizer is {own} here, and {kind} in the checkpoint")
        return
    owners = manifest.values.get("owners")
    found.written = [name for one in (owners or {}).get("same", ()) for name in one["written"]]
    match_options(manifest, trained, optimizer, found)
    if owners is None and updates:  # the checkpoint is of another format, or had no whole parameters
        manifest.values["owners"] = {"same": [{"written": [], "attributes": {}} for _ in updates]}
    records, states = manifest.records, manifest.states
    idle = [slot for buffer in trained.plan.buffers if not buffer.updated for slot in buffer.slots]
    found.differences += [
        f"the checkpoint has the optimizer's state of {slot.name}, which is not updated here"
        for slot in idle
        if saved_names(manifest, slot.leaf.names) & {*records, *states}
    ]
    for rule in trained.rules:
        _match_rule(rule, manifest, trained, places, found, owners is None)


def _match_rule(
    rule: Rule, manifest: Manifest, trained: Trained, places: dict[str, str], found: Match, foreign: bool
) -> None:
    """``foreign``: whether the owners' state was saved as tensors."""
    records, states, kept = manifest.records, manifest.states, trained.state.optimizer
    problems: list[str] = []
    fits: dict[str, str] = {}
    firsts: dict[str, str] = {}  # by parameter, its name in the checkpoint
    lost = ""
    for buffer in trained.plan.buffers:
        for slot in buffer.slots if buffer.updated and buffer.group == rule.group else ():
            if name_of(slot) not in places:
                lost = lost or slot.name
                continue
            first = places[name_of(slot)].removeprefix("model.")
            if first not in records:
                problems.append(f"the checkpoint has no optimizer's state of {slot.name}")
                continue
            firsts[slot.name], shape = first, slot.leaf.whole_shape
            here, there = set(per_element(buffer, trained.rules)), states.get(first, set())
            for name in sorted(here | there):
                saved, what = f"optimizer.state.{first}.{name}", f"{name} of {slot.name}"
                if name not in there:
                    problems.append(f"the optimizer's {what} is not in the checkpoint")
                elif name not in here:
                    problems += [f"the optimizer keeps no {what}"] * (not (rule.whole and foreign))
                elif reason := unlike(manifest.tensors[saved], shape, kept[f"{buffer.key}.{name}"].dtype):
                    problems.append(f"the optimizer's {what} {reason}")
                else:
                    fits[name_of(slot, name)] = saved
    if lost:
        problems.append(f"the optimizer's state of group {rule.group} is of other parameters ({lost} is new)")
    if rule.whole and foreign:
        problems += owned_state.from_tensors(manifest, firsts, trained.updates)
    decoded = {name: decode(records[first], {}) for name, first in firsts.items()}
    stepped, numbers = of_group(rule, decoded)
    problems += _scalars(rule, numbers.values())
    if problems and firsts:  # a group has one count of steps
        problems.append(
            f"so the optimizer's state of group {rule.group} is not loaded, that of these parameters too: "
            f"{', '.join(firsts)}"
        )
    found.differences += problems
    if not problems and firsts:
        places |= fits
        found.owned |= {name: OWNED + first for name, first in firsts.items() if rule.whole}
        found.scalars[rule.key], found.updated[rule.key] = dict(numbers[next(iter(numbers))]), stepped


def _scalars(rule: Rule, rows: Collection[Numbers]) -> list[str]:
    """Why these saved numbers are not those that the rule starts from."""
    wanted = {entry.name for entry in rule.state if entry.scalar}
    problems = []
    for own in rows:
        if odd := wanted ^ set(own):
            names = ", ".join(sorted(odd))
            problem = f"the optimizer's {names} of group {rule.group} is only in one of checkpoint and optimizer"
            problems += [problem] * (problem not in problems)
    if any(len({own[name] for own in rows if name in own}) > 1 for name in wanted):
        problems.append(
            f"the parameters of group {rule.group} are of different age in the checkpoint (their step counts differ): "
            "they were in groups of their own"
        )
    return problems


def match(manifest: Manifest, trained: Trained, place: Place, weights: Collection[str] | None = None) -> Match:
    """What of the checkpoint fits this model and optimizer, and what does not, on each side.

    ``wanted`` is what the rank at this place holds. ``weights``: where weights alone are compared, the buffers among
    them. Then dtypes may be others of the same kind.
    """
    state, cast = trained.state, weights is not None
    found = Match()
    places = _parameters(manifest, trained.plan, state.buffers if weights is None else weights, found, cast)
    if not cast:
        match_optimizer(manifest, trained, places, found)
    _beside(manifest, state, weights, found)
    want(trained, place, places, found)
    return found


def want(trained: Trained, place: Place, places: Mapping[str, str], found: Match) -> None:
    """Adds the chunks that the rank at this place holds of what fits. ``places``: by our name, the saved name."""
    for one in trained.chunks(place):
        if one.name in places:
            found.wanted.append(replace(one, name=places[one.name]))


def _parameters(manifest: Manifest, plan: Plan, buffers: Iterable[str], found: Match, cast: bool) -> dict[str, str]:
    """For parameters: by our name of a tensor, the saved name that fits it."""
    places: dict[str, str] = {}
    used: set[str] = set()
    for slot in (slot for buffer in plan.buffers for slot in buffer.slots):
        saved = saved_names(manifest, slot.leaf.names)
        used |= saved
        if not saved:
            found.differences.append(f"{slot.name} is not in the checkpoint")
        elif len(saved) > 1:
            found.differences.append(f"{' and '.join(sorted(saved))} are one parameter here, and two in the checkpoint")
        elif reason := unlike(manifest.tensors[f"model.{min(saved)}"], slot.leaf.whole_shape, slot.leaf.dtype, cast):
            found.differences.append(f"{slot.name} {reason}")
        else:
            places[name_of(slot)] = f"model.{min(saved)}"
    saved_parameters = {name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")}
    # Other formats do not tell parameters from buffers, and have a tied parameter under each of its names.
    saved_parameters -= used | set(buffers) | {name for name, first in manifest.aliases.items() if first in used}
    found.differences += [f"{name} is not in the model" for name in sorted(saved_parameters)]
    return places


def _beside(manifest: Manifest, state: State, weights: Collection[str] | None, found: Match) -> None:
    """Matches buffers, and tensors that the loss updates. A tensor that no program reads yet is compared once a program
    does."""
    saved = [key.partition(" ")[::2] for key in manifest.values]
    found.constants += [name for kind, name in saved if kind == "constant" and name not in state.constants]
    rows = [
        (f"the buffer {name}", one, name, buffer_value(manifest, name), found.buffers)
        for name, one in state.buffers.items()
        if weights is None or name in weights
    ]
    rows += [
        (f"the tensor {name} that the loss updates", one, name, manifest.values[f"constant {name}"], found.constants)
        for name, one in state.constants.items()
        if f"constant {name}" in manifest.values
    ]
    for what, own, name, value, fits in rows:
        if value is None:
            found.differences.append(f"{what} is not in the checkpoint")
        elif reason := unlike(manifest.tensors[first_of(value)["$tensor"]], own.shape, own.dtype, weights is not None):
            found.differences.append(f"{what} {reason}")
        else:
            fits.append(name)
    odd = sorted(name for kind, name in saved if kind == "buffer" and name not in state.buffers)
    found.differences += [f"the buffer {name} is not in the model" for name in odd]


def buffer_value(manifest: Manifest, name: str) -> dict[str, Any] | None:
    """The saved value of a buffer; a converted checkpoint may have it among the parameters."""
    if f"buffer {name}" not in manifest.values and f"model.{name}" in manifest.tensors:
        return {"same": {"$tensor": f"model.{name}"}}
    return manifest.values.get(f"buffer {name}")
