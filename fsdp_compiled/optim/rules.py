"""Makes rules from a `torch.optim` optimizer: how its groups are updated, each in one of three ways (`rule.Rule`).

    a class of torch.optim     -> traced into the program, over flat shards
    any other, element-wise    -> as it is, its own step on the flat shards, after the program
    what needs the whole       -> as it is, on whole parameters, each on the rank that owns it (`whole`)

A rule is for a whole param group. All are tried against the optimizer itself (`ways`, `whole`). A group that fails in
every way is refused by name. In a traced update the step count and the rate are 0-d tensors, so a scheduler never
causes a recompilation. The arithmetic on them is in float64, as Python's is, so on a CPU the update of PyTorch's own
optimizers is bit for bit the eager one. ``foreach``, ``fused`` and ``capturable`` choose between implementations of one
formula, and are ignored on shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from fsdp_compiled.optim.given_optimizer import numbered
from fsdp_compiled.optim.hyperparameters import hyper, options_of, scheduled
from fsdp_compiled.optim.optimizer_copy import Refused, copy_of, fresh_of, named_state, plain_options, state_of
from fsdp_compiled.optim.rule import Kept, Rule, StateTensor, formula_of
from fsdp_compiled.optim.step import Part, make_step, number_of
from fsdp_compiled.optim.tracing import SHAPE, Subject, trace
from fsdp_compiled.optim.trial import initial
from fsdp_compiled.optim.ways import key_of, noted_by, once, way_of
from fsdp_compiled.optim.whole import check_runs_on_some


def make_rules(optimizer: Optimizer) -> tuple[Rule, ...]:
    """The rule of each parameter group. Raises ``ValueError`` for an optimizer that cannot be used, by name."""
    return tuple(
        replace(rule, group=rule.group + first) for one, first in numbered(optimizer) for rule in _make_rules(one)
    )


def _make_rules(optimizer: Optimizer) -> list[Rule]:
    """The rules of one optimizer."""
    rules: list[Rule] = []
    refused: dict[int, Refused] = {}
    for index, group in enumerate(optimizer.param_groups):
        try:
            rules.append(_on_shards(optimizer, index, group, scheduled(group)))
        except Refused as error:
            refused[index] = error
    if refused and any(entry.place in ("optimizer", "state") for rule in rules for entry in rule.state):
        refused |= {rule.group: Refused("its groups share state") for rule in rules}
    whole = [_whole_rule(optimizer, index, str(error)) for index, error in refused.items()]
    return sorted([*(rule for rule in rules if rule.group not in refused), *whole], key=lambda rule: rule.group)


def _whole_rule(optimizer: Optimizer, index: int, reason: str) -> Rule:
    """A rule by which the optimizer's own code runs on whole parameters, of which each rank has some."""
    group = optimizer.param_groups[index]
    kinds = {(p.dtype, p.dim()) for p in group["params"] if p.requires_grad} or {(torch.float32, 2)}
    ordered = sorted(kinds, key=str)
    key = None if noted_by(group["params"]) else key_of(optimizer, group, {}, torch.float64)
    known = ("whole", *ordered, *key) if key is not None else None
    try:
        nonzero = bool(once(known, lambda: check_runs_on_some(optimizer, group, ordered)))
    except Refused as error:
        raise ValueError(_refusal(type(optimizer), str(error))) from error
    names, name = scheduled(group), type(optimizer).__name__
    return Rule(index, name, (), names, _no_graph, nonzero=nonzero, eagerly=reason, whole=True)


def _no_graph(*_: Any) -> fx.Graph:
    raise ValueError("An optimizer that runs as it is has no graph.")


def make_rules_again(optimizer: Optimizer, before: Sequence[Rule], stepped: Collection[str]) -> tuple[Rule, ...]:
    """The rules of an optimizer that was changed, for buffers and state that the rules ``before`` laid out.
    ``stepped``: the keys of the rules that have made steps."""
    found: list[Rule] = []
    for one, first in numbered(optimizer):
        for old in (rule for rule in before if rule.group in range(first, first + len(one.param_groups))):
            index = old.group - first
            new = replace(_again(one, index, old), group=old.group)
            if old.key in stepped and {entry.name for entry in new.state} - {entry.name for entry in old.state}:
                _check_goes_on(one, one.param_groups[index], old, new)
            found.append(new)
    return tuple(found)


def _again(optimizer: Optimizer, index: int, old: Rule) -> Rule:
    group = optimizer.param_groups[index]
    if old.whole:
        return _whole_rule(optimizer, index, old.eagerly or "")
    try:
        new = _on_shards(optimizer, index, group, scheduled(group))
    except Refused as error:
        raise ValueError(_changed(old, f"it can no longer be updated in shards: {error}")) from error
    if (old.eagerly is None) != (new.eagerly is None):
        now, then = ("as it is", "inside of the step's program")[:: 1 if new.eagerly else -1]
        raise ValueError(_changed(old, f"its update would run {now}, and ran {then} ({new.eagerly or old.eagerly})"))
    kept, wanted = ({entry.name for entry in rule.state} for rule in (old, new))
    if "undamped" in wanted - kept or (kept and "first" in wanted and kept != wanted):
        names = ", ".join(sorted(wanted - kept)) or "first"
        raise ValueError(_changed(old, f"it needs state that it makes only at its first step ({names})"))
    return new


def _changed(rule: Rule, what: str) -> str:
    return f"{rule.name} was changed after compile_sharded, and now {what}. Change it before compile_sharded."


def _refusal(kind: type, reason: str) -> str:
    return (
        f"{kind.__name__} is not supported: {reason}. An optimizer can be sharded if it updates each parameter from "
        "its own gradient and state alone. Use one that does, such as AdamW, SGD, Adagrad, Adafactor or Muon."
    )


def _on_shards(optimizer: Optimizer, index: int, group: Mapping[str, Any], names: Sequence[str]) -> Rule:
    """The rule of a group that is updated in shards, traced or as it is. Raises `Refused`."""
    dtypes = {parameter.dtype for parameter in group["params"] if parameter.requires_grad} or {torch.float32}
    values = {name: hyper(group, name) for name in names}
    options = plain_options(options_of(group))
    ways = [way_of(optimizer, group, values, dtype) for dtype in sorted(dtypes, key=str)]
    way = replace(ways[0], nonzero=any(one.nonzero for one in ways))
    if any((one.kept, one.capturable) != (way.kept, way.capturable) for one in ways):
        raise Refused("it keeps other state for each of its group's dtypes")
    kind = type(optimizer)
    # What it is now is what the traced update does.
    subject = way.subject(copy_of(optimizer, [{"params": []}], named_state(optimizer)), options, values)
    state = _current(subject, optimizer, group)
    common = partial(Rule, index, kind.__name__, state, tuple(values), nonzero=way.nonzero, kept=way.kept)
    if way.eagerly is not None:
        return common(trace=_no_graph, eagerly=way.eagerly)
    formula = formula_of(kind, subject.options, tuple(values), {entry.name for entry in state})
    return common(trace=cache(partial(trace, subject)), formula=formula)


def _current(subject: Subject, optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """The state's entries. Numbers have the values that an optimizer brings along if it has made steps already."""
    holders: dict[str, Mapping[str, Any]] = {"group": group, "optimizer": vars(optimizer), "state": state_of(optimizer)}
    resumed = any(entry.name == "first" for entry in subject.kept.state) and _has_begun(subject, optimizer, group)

    def one(entry: StateTensor) -> StateTensor:
        if entry.name == "first" and entry.place == "ours":
            return replace(entry, initial=0.0 if resumed else 1.0)
        known = holders.get(entry.place, {}).get(entry.name)
        return entry if known is None else replace(entry, initial=float(known))

    return tuple(map(one, subject.kept.state))


def _has_begun(subject: Subject, optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a parameter of the group, or the group, has state that only a first step makes; constructors make some
    state, too."""
    state = state_of(optimizer)
    own = [kept for parameter in group["params"] if (kept := state.get(parameter))]
    fresh = fresh_of(optimizer, subject.options, nn.Parameter(torch.ones(2, 3)))
    if fresh is None:
        return bool(own)
    names = {name for kept in own for name, value in kept.items() if value is not None}
    places: list[tuple[str, Any, Any]] = [
        ("parameter", subject.kept.started, names),
        ("group", fresh.param_groups[0], group),
        ("state", fresh.state, state),
        ("optimizer", vars(fresh), vars(optimizer)),
    ]
    for place, made, there in places:
        entries = {e.container or e.name for e in subject.kept.state if e.place == place}
        if lazy := [name for name in entries if name not in made]:
            return any(name in there for name in lazy)
    return bool(own)


def _check_goes_on(optimizer: Optimizer, group: Mapping[str, Any], old: Rule, new: Rule) -> None:
    """Raises ``ValueError`` if the code fails on the state that ``old`` has made, of which ``new`` has more.

    RMSprop looks for ``grad_avg`` once ``centered`` is set, and fails, since its first step made none. SGD makes its
    momentum where it finds none. The code itself shows which case it is: it makes one step on what was kept before.
    """
    before = {entry.name for entry in old.state}
    more = sorted(entry.name for entry in new.state if entry.name not in before)
    try:
        _step_on(optimizer, plain_options(options_of(group)), old.state)
    except Exception as error:
        raise ValueError(
            f"{old.name} was changed after its first steps, and now looks for state that they did not make "
            f"({', '.join(more)}): on what it has it fails, {type(error).__name__}: {error}. Put the change back, or "
            "make it before compile_sharded."
        ) from error


@torch.no_grad()
def _step_on(optimizer: Optimizer, options: dict[str, Any], state: tuple[StateTensor, ...]) -> None:
    """Makes one step of the optimizer's code on a small parameter that has this state, some steps old."""
    if any(entry.container for entry in state):
        raise KeyError("it keeps state in containers, which are laid out once")
    parameter = nn.Parameter(torch.ones(SHAPE, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    # Numbers are not the initial ones: code that asks whether it is the first step must see that it is not.
    tensors = {entry.name: initial(entry, parameter) + entry.scalar for entry in state}
    part = Part(Kept(state, ()), options, tensors, [(parameter, tensors)])
    made = copy_of(optimizer, [{"params": []}], {})
    with suppress(Refused):  # after the step: what it made besides is what the new rule has more
        make_step(made, [part], number_of)
