"""A `torch.optim` optimizer -> rules that update flat shards: traced from its own code, and tried.

    discover what it keeps -> trace -> try against the optimizer itself -> believe
    or, where that cannot be       -> try it as it is, on pieces (`eager`)  -> believe
    or, where it needs the whole   -> try it as it is, on some (`whole`)    -> believe, or refuse by name

A rule is for a whole param group. Where the code asks for a parameter's shape (no decay on vectors, a rate that is
scaled by the fan-in), it is traced for each shape that the group has, and shapes whose graphs differ get rules of their
own, *variants*, whose parameters lie in buffers of their own.

The step count and the learning rate are 0-d tensors of the trace, so a scheduler never causes a recompilation. The
arithmetic on them is in float64, as Python's is: on a CPU the update of PyTorch's own optimizers is bit for bit the
eager one. ``foreach``, ``fused`` and ``capturable`` choose between implementations of one formula, and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from fsdp_compiled.optim.eager import check_runs_on_pieces
from fsdp_compiled.optim.fused import formula_of
from fsdp_compiled.optim.groups import hyper, options_of, scheduled
from fsdp_compiled.optim.later_state import check_goes_on
from fsdp_compiled.optim.outside import notes_read
from fsdp_compiled.optim.rule import Rule, StateTensor, rule_for
from fsdp_compiled.optim.rule_graph import for_size, text_of
from fsdp_compiled.optim.together import numbered
from fsdp_compiled.optim.tracing import Subject, trace
from fsdp_compiled.optim.twin import (
    Refused,
    Untraceable,
    fresh_of,
    named_state,
    plain_options,
    state_of,
    twin_of,
)  # fmt: skip
from fsdp_compiled.optim.verdicts import CPU, key_of, once, subject_of, verdict_of
from fsdp_compiled.optim.whole import check_runs_on_some, may_be_called_on_some


def make_rules(optimizer: Optimizer) -> tuple[Rule, ...]:
    """The rules of each parameter group. Raises ``ValueError`` for an optimizer that cannot be used, by name.

    Traced where it can be; else as it is on pieces of shards, all groups; else as it is on whole parameters, those
    groups that cannot be traced.
    """
    return tuple(
        replace(rule, group=rule.group + first) for one, first in numbered(optimizer) for rule in _make_rules(one)
    )


def _make_rules(optimizer: Optimizer) -> tuple[Rule, ...]:
    """Of one optimizer."""
    rules: list[Rule] = []
    refused: dict[int, Refused] = {}
    notes = notes_of(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        try:
            if notes:
                raise Untraceable(f"it may read {notes[0]!r}, an attribute of parameters")
            rules += _rules_of(optimizer, index, group, scheduled(group))
        except Refused as error:
            refused[index] = error
    if not refused:
        return tuple(rules)
    if all(isinstance(error, Untraceable) for error in refused.values()):
        with suppress(Refused):
            return _eager_rules(optimizer, str(next(iter(refused.values()))))
    if any(entry.place in ("optimizer", "state") for rule in rules for entry in rule.state):
        refused |= {index: Refused("its groups share state") for index in range(len(optimizer.param_groups))}
    whole = {index: _whole_rule(optimizer, index, str(error)) for index, error in refused.items()}
    traced = [rule for rule in rules if rule.group not in whole]
    return tuple(sorted([*traced, *whole.values()], key=lambda rule: (rule.group, rule.variant)))


def _eager_rules(optimizer: Optimizer, reason: str) -> tuple[Rule, ...]:
    """Rules that say that the optimizer's own code runs, on pieces of the shards: for all groups, which it goes through
    by itself. Raises `Refused`."""
    rules = []
    for index, group in enumerate(optimizer.param_groups):
        dtypes = sorted({parameter.dtype for parameter in group["params"]}, key=str)
        nonzero = _tried(optimizer, group, ("pieces", *dtypes), partial(check_runs_on_pieces, dtypes=dtypes))
        rules.append(_as_it_is(optimizer, index, reason, nonzero))
    return tuple(rules)


def _whole_rule(optimizer: Optimizer, index: int, reason: str) -> Rule:
    """A rule that says that the optimizer's own code runs, on whole parameters, of which each rank has some."""
    group = optimizer.param_groups[index]
    kinds = {(p.dtype, p.dim()) for p in group["params"] if p.requires_grad} or {(torch.float32, 2)}
    ordered = sorted(kinds, key=str)
    try:
        nonzero = _tried(optimizer, group, ("whole", *ordered), partial(check_runs_on_some, kinds=ordered))
    except Refused as error:
        raise ValueError(_refusal(type(optimizer), str(error))) from error
    apart = _tried(
        optimizer, group, ("apart", *ordered), partial(may_be_called_on_some, kinds=ordered, divides=nonzero)
    )
    return replace(_as_it_is(optimizer, index, reason, nonzero), whole=True, apart=apart)


def _as_it_is(optimizer: Optimizer, index: int, reason: str, nonzero: bool) -> Rule:
    names = scheduled(optimizer.param_groups[index])
    return Rule(index, type(optimizer).__name__, (), names, _no_graph, nonzero=nonzero, eagerly=reason)


def _tried(optimizer: Optimizer, group: Mapping[str, Any], kind: tuple[Any, ...], check: Callable[..., bool]) -> bool:
    """What this check of the group says, asked once; raises `Refused`."""
    noted = any(vars(parameter) for parameter in group["params"])
    key = None if noted else key_of(optimizer, group, {}, torch.float64)
    return bool(once((*kind, *key) if key is not None else None, lambda: check(optimizer, group)))


def notes_of(optimizer: Optimizer) -> list[str]:
    """Attributes of its parameters that its code may read."""
    return notes_read(type(optimizer), (p for group in optimizer.param_groups for p in group["params"]))


def _no_graph(*_: Any) -> fx.Graph:
    raise ValueError("An optimizer that runs as it is has no graph.")


def make_rules_again(optimizer: Optimizer, before: Sequence[Rule], stepped: Collection[str]) -> tuple[Rule, ...]:
    """The rules of an optimizer that was changed, for buffers and state that were laid out by those of ``before``;
    ``stepped``: the keys of those that have made steps."""
    found: list[Rule] = []
    for one, first in numbered(optimizer):
        old = [rule for rule in before if rule.group in range(first, first + len(one.param_groups))]
        own = [replace(rule, group=rule.group - first) for rule in old]
        again = [replace(rule, group=rule.group + first) for rule in _make_rules_again(one, own)]
        for rule, new in zip(old, again, strict=False):  # fewer where it runs as it is, and looks by itself
            if rule.key in stepped and {entry.name for entry in new.state} - {entry.name for entry in rule.state}:
                check_goes_on(one, one.param_groups[rule.group - first], rule, new)
        found += again
    return tuple(found)


def _make_rules_again(optimizer: Optimizer, before: Sequence[Rule]) -> tuple[Rule, ...]:
    if before and before[0].eagerly is not None and not before[0].whole:
        try:
            return _eager_rules(optimizer, before[0].eagerly)
        except Refused as error:
            raise ValueError(_refusal(type(optimizer), str(error))) from error
    whole = {old.group: _whole_rule(optimizer, old.group, old.eagerly or "") for old in before if old.whole}
    rules = _make_rules(optimizer) if any(not old.whole for old in before) else ()
    if odd := [rule for rule in rules if rule.eagerly is not None and rule.group not in whole]:
        raise ValueError(
            f"{odd[0].name} was changed after compile_sharded, and its update can no longer be traced "
            f"({odd[0].eagerly}), which is how its state was laid out. Change it before compile_sharded."
        )
    found = []
    for old in before:
        if old.whole:
            found.append(whole[old.group])
            continue
        variants = {variant_of(rules, old.group, shape, dtype) for dtype, shape in old.kinds}
        if len(variants) > 1:
            raise ValueError(
                f"{old.name} was changed after compile_sharded, and now updates parameters in several ways that it "
                f"updated alike (group {old.group}), by which they are laid out in shards. Change it before "
                "compile_sharded."
            )
        new = replace(rule_for(rules, old.group, variants.pop()), variant=old.variant, kinds=old.kinds)
        kept, wanted = ({entry.name for entry in rule.state} for rule in (old, new))
        if "undamped" in wanted - kept or (kept and "first" in wanted and kept != wanted):
            raise ValueError(
                f"{old.name} was changed after compile_sharded, and now needs state that it makes only at its first "
                f"step ({', '.join(sorted(wanted - kept)) or 'first'}). Change it before compile_sharded."
            )
        found.append(new)
    return tuple(found)


def variant_of(rules: Sequence[Rule], group: int | None, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Which of its group's rules updates a parameter."""
    return next((r.variant for r in rules if r.group == group and (dtype, tuple(shape)) in r.kinds), 0)


def _refusal(kind: type, reason: str) -> str:
    return (
        f"{kind.__name__} is not supported: {reason}. An optimizer can be sharded if it updates each parameter from "
        "its own gradient and state alone. Use one that does, such as AdamW, SGD, Adagrad, Adafactor or Muon."
    )


def _rules_of(optimizer: Optimizer, index: int, group: Mapping[str, Any], names: Sequence[str]) -> list[Rule]:
    kinds = sorted(
        {(parameter.dtype, tuple(parameter.shape)) for parameter in group["params"] if parameter.requires_grad},
        key=str,
    ) or [(torch.float32, (2, 3))]
    values = {name: hyper(group, name) for name in names}
    options = plain_options(options_of(group))
    frozen = twin_of(optimizer, [{"params": []}], named_state(optimizer))  # what it is now is what the rule does
    found: dict[Any, tuple[Subject, tuple[int, ...], list[Any]]] = {}
    for dtype in dict.fromkeys(dtype for dtype, _ in kinds):
        verdict = verdict_of(optimizer, group, values, dtype)
        subject = subject_of(frozen, options, values, verdict)
        own = [kind for kind in kinds if kind[0] == dtype]
        for kind in own:
            text = text_of(trace(subject, kind[1], dtype, CPU).graph, kind[1]) if verdict.asked_shape else ""
            shape = kind[1] if verdict.asked_shape else (2, 3)
            found.setdefault((verdict, text), (subject, shape, []))[2].append(kind)
    return [
        replace(
            _bind(index, variant, subject, _current(subject, optimizer, group), shape, tuple(members)),
            nonzero=verdict.nonzero,
        )
        for variant, ((verdict, _), (subject, shape, members)) in enumerate(found.items())
    ]


def _current(subject: Subject, optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """The state, its numbers as an optimizer that has made steps already brings them along."""
    holders: dict[str, Mapping[str, Any]] = {"group": group, "optimizer": vars(optimizer), "state": state_of(optimizer)}
    resumed = subject.first and _has_begun(subject, optimizer, group)

    def one(entry: StateTensor) -> StateTensor:
        if entry.name == "first" and entry.place == "ours":
            return replace(entry, initial=0.0 if resumed else 1.0)
        known = holders.get(entry.place, {}).get(entry.name)
        return entry if known is None else replace(entry, initial=float(known))

    return tuple(map(one, subject.state))


def _has_begun(subject: Subject, optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a parameter of the group, or the group, has what only a first step makes; some is made by
    constructors."""
    state = state_of(optimizer)
    own = [kept for parameter in group["params"] if (kept := state.get(parameter))]
    fresh = fresh_of(optimizer, subject.options, nn.Parameter(torch.ones(2, 3)))
    if fresh is None:
        return bool(own)
    names = {name for kept in own for name, value in kept.items() if value is not None}
    places: list[tuple[str, Any, Any]] = [
        ("parameter", subject.started, names),
        ("group", fresh.param_groups[0], group),
        ("state", fresh.state, state),
        ("optimizer", vars(fresh), vars(optimizer)),
    ]
    for place, made, there in places:
        entries = {e.container or e.name for e in subject.state if e.place == place}
        if lazy := [name for name in entries if name not in made]:
            return any(name in there for name in lazy)
    return bool(own)


def _bind(
    index: int, variant: int, subject: Subject, state: tuple[StateTensor, ...], shape: tuple[int, ...],
    kinds: tuple[Any, ...],
) -> Rule:  # fmt: skip
    @cache
    def once(dtype: torch.dtype, device: torch.device) -> fx.Graph:
        return trace(subject, shape, dtype, device).graph

    @cache
    def traced(numel: int, dtype: torch.dtype, device: torch.device) -> fx.Graph:
        return for_size(once(dtype, device), shape, numel)

    kind = type(subject.optimizer)
    formula = formula_of(kind, subject.options, tuple(subject.hypers), {entry.name for entry in subject.state})
    return Rule(index, kind.__name__, state, tuple(subject.hypers), traced, formula, variant, kinds)
