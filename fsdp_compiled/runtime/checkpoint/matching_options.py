"""The options of an optimizer's groups: which a load compares, and which it takes from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.optimizer_copy import IMPLEMENTATIONS
from fsdp_compiled.optim.param_groups import NOTES, options_of, scheduled
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint.contents import plain
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.match import Match
from fsdp_compiled.runtime.checkpoint.values import decode, encode


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
