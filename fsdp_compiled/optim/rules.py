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

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from fsdp_compiled.optim.discovery import begin_of, discover
from fsdp_compiled.optim.eager import check_runs_on_pieces
from fsdp_compiled.optim.fused import formula_of
from fsdp_compiled.optim.groups import hyper, options_of, scheduled
from fsdp_compiled.optim.nested import Form
from fsdp_compiled.optim.outside import Outside, notes_read
from fsdp_compiled.optim.rule import Rule, StateTensor, rule_for
from fsdp_compiled.optim.scalars import Forks
from fsdp_compiled.optim.together import numbered
from fsdp_compiled.optim.tracing import Subject, for_size, text_of, trace
from fsdp_compiled.optim.trial import FACTORS, SHAPES, Trial
from fsdp_compiled.optim.twin import (
    Refused,
    Untraceable,
    attributes_of,
    fresh_of,
    has_stepped,
    meaning,
    named_state,
    plain_options,
    state_of,
    step_of,
    twin_of,
)  # fmt: skip
from fsdp_compiled.optim.whole import check_runs_on_some

CPU = torch.device("cpu")
PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Verdict:
    """How an optimizer is traced, as its trial found it."""

    state: tuple[StateTensor, ...]
    started: tuple[str, ...]
    empty: tuple[str, ...]
    forms: tuple[tuple[str, Form], ...]
    branchless: bool
    first: bool
    asked_shape: bool
    nonzero: bool = False  # whether its code divides by the rate


_VERDICTS: dict[Any, Any] = {}  # a `Verdict` or a `Refused`, by class, options and attributes


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
    return replace(_as_it_is(optimizer, index, reason, nonzero), whole=True)


def _as_it_is(optimizer: Optimizer, index: int, reason: str, nonzero: bool) -> Rule:
    names = scheduled(optimizer.param_groups[index])
    return Rule(index, type(optimizer).__name__, (), names, _no_graph, nonzero=nonzero, eagerly=reason)


def _tried(optimizer: Optimizer, group: Mapping[str, Any], kind: tuple[Any, ...], check: Callable[..., bool]) -> bool:
    """What this check of the group says, asked once; raises `Refused`."""
    noted = any(vars(parameter) for parameter in group["params"])
    key = None if noted else _key(optimizer, group, {}, torch.float64)
    return bool(_once((*kind, *key) if key is not None else None, lambda: check(optimizer, group)))


def _once(key: Any, judge: Callable[[], Any]) -> Any:
    """What ``judge`` says or refuses, asked once for each key; every time where that is None."""
    found = _VERDICTS.get(key) if key is not None else None
    if found is None:
        try:
            found = judge()
        except Refused as error:
            found = error.with_traceback(None)
        if key is not None:
            _VERDICTS[key] = found
    if isinstance(found, Refused):
        raise type(found)(str(found))
    return found


def notes_of(optimizer: Optimizer) -> list[str]:
    """Attributes of its parameters that its code may read."""
    return notes_read(type(optimizer), (p for group in optimizer.param_groups for p in group["params"]))


def _no_graph(*_: Any) -> fx.Graph:
    raise ValueError("An optimizer that runs as it is has no graph.")


def make_rules_again(optimizer: Optimizer, before: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of an optimizer that was changed, for buffers and state that were laid out by those of ``before``."""
    found: list[Rule] = []
    for one, first in numbered(optimizer):
        groups = range(first, first + len(one.param_groups))
        own = [replace(old, group=old.group - first) for old in before if old.group in groups]
        found += [replace(rule, group=rule.group + first) for rule in _make_rules_again(one, own)]
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
        if kept and "first" in wanted and kept != wanted:
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
        verdict = _verdict(optimizer, group, values, dtype)
        subject = _subject(frozen, options, values, verdict)
        own = [kind for kind in kinds if kind[0] == dtype]
        for kind in own:
            text = text_of(trace(subject, kind[1], dtype, CPU).graph, kind[1]) if verdict.asked_shape else ""
            shape = kind[1] if verdict.asked_shape else (2, 3)
            found.setdefault((verdict, text), (subject, shape, []))[2].append(kind)
    return [
        replace(
            _bind(index, variant, subject, _current(subject.state, optimizer, group), shape, tuple(members)),
            nonzero=verdict.nonzero,
        )
        for variant, ((verdict, _), (subject, shape, members)) in enumerate(found.items())
    ]


def _subject(
    optimizer: Optimizer, options: Mapping[str, Any], values: Mapping[str, float], verdict: Verdict
) -> Subject:
    if verdict.branchless:
        options = {**options, "capturable": True}
    return Subject(
        optimizer, options, values, verdict.state, verdict.started, verdict.empty, verdict.forms, verdict.branchless,
        verdict.first,
    )  # fmt: skip


def _current(state: Sequence[StateTensor], optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """The state, its numbers as an optimizer that has made steps already brings them along."""
    holders: dict[str, Mapping[str, Any]] = {"group": group, "optimizer": vars(optimizer), "state": state_of(optimizer)}
    resumed = has_stepped(optimizer)

    def one(entry: StateTensor) -> StateTensor:
        if entry.name == "first" and entry.place == "ours":
            return replace(entry, initial=0.0 if resumed else 1.0)
        known = holders.get(entry.place, {}).get(entry.name)
        return entry if known is None else replace(entry, initial=float(known))

    return tuple(map(one, state))


def _bind(
    index: int, variant: int, subject: Subject, state: tuple[StateTensor, ...], shape: tuple[int, ...],
    kinds: tuple[Any, ...],
) -> Rule:  # fmt: skip
    cache: dict[tuple[torch.dtype, torch.device], fx.Graph] = {}

    def traced(numel: int, dtype: torch.dtype, device: torch.device) -> fx.Graph:
        key = (dtype, device)
        if key not in cache:
            cache[key] = trace(subject, shape, *key).graph
        return for_size(cache[key], shape, numel)

    kind = type(subject.optimizer)
    formula = formula_of(kind, subject.options, tuple(subject.hypers), {entry.name for entry in subject.state})
    return Rule(index, kind.__name__, state, tuple(subject.hypers), traced, formula, variant, kinds)


def _verdict(
    optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype
) -> Verdict:
    key = _key(optimizer, group, values, dtype)
    return _once(key, lambda: _judge(optimizer, group, values, dtype))  # type: ignore[no-any-return]


def _key(optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype) -> Any:
    """What a verdict depends on; None where that cannot be said."""
    options = {name: value for name, value in options_of(group).items() if name not in values}
    attributes = attributes_of(optimizer)
    if not _is_plain((options, attributes)):
        return None
    zeros = tuple((name, value == 0) for name, value in values.items())
    kind = type(optimizer)
    if (read := Outside(kind).key) is None:
        return None
    return kind, step_of(kind), read, repr(sorted(options.items())), repr(sorted(attributes.items())), zeros, dtype


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, PLAIN)


def _judge(optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype) -> Verdict:
    """Raises `Refused`, whatever the optimizer's code fails with."""
    options = plain_options(options_of(group))
    example = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))
    options = begin_of(optimizer, options, fresh_of(optimizer, options, example))
    own = type(optimizer).__module__.startswith("torch.optim")
    dtypes = (dtype,) if own or dtype == torch.float64 else (torch.float64, dtype)
    try:
        with torch.no_grad():
            kept = discover(optimizer, options, dtype)
            state = kept.state
            damped = any(entry.name == "momentum_buffer" for entry in state) and options.get("dampening", 0) != 0
            if damped and step_of(type(optimizer)) is step_of(torch.optim.SGD):
                state = (*state, StateTensor("undamped", True, 1.0, torch.float64, "ours"))
            verdict = Verdict(state, kept.started, kept.empty, kept.forms, False, False, False)
            reasons = []
            for one in _forms(verdict, options, own, kept.begun):
                try:
                    reason, asked = _try(optimizer, options, values, one, dtypes)
                except ZeroDivisionError:
                    one = replace(one, nonzero=True)
                    reason, asked = _try(optimizer, options, values, one, dtypes)
                if reason is None:
                    return replace(one, asked_shape=asked)
                reasons.append(reason)
    except Refused:
        raise
    except Forks as error:
        raise Untraceable("its Python code branches on numbers that change") from error
    except Exception as error:
        raise meaning(error, "its step cannot be traced", Untraceable) from error
    raise Untraceable(f"on flat shards it does not do what it does on parameters: {reasons[-1]}")


def _forms(verdict: Verdict, options: Mapping[str, Any], own: bool, begun: bool) -> list[Verdict]:
    """In which an optimizer's code is traced, in the order they are tried."""
    forms = [verdict]
    if own and "capturable" in options:
        wide = tuple(
            replace(entry, dtype=torch.float64) if entry.scalar else entry for entry in verdict.state
        )  # fmt: skip
        forms.append(replace(verdict, state=wide, branchless=True))
    first = StateTensor("first", True, 1.0, torch.float64, "ours")
    return [*([] if begun and not own else forms), replace(verdict, state=(*verdict.state, first), first=True)]


def _try(
    optimizer: Optimizer, options: Mapping[str, Any], values: Mapping[str, float], verdict: Verdict,
    dtypes: Sequence[torch.dtype],
) -> tuple[str | None, bool]:  # fmt: skip
    """Why this form is not believed, or None, and whether the code asks for shapes."""
    subject = _subject(optimizer, options, values, verdict)
    for dtype in dtypes:
        traced = trace(subject, (2, 3), dtype, CPU)
        if traced.forked and type(optimizer).__module__.startswith("torch.optim") and not verdict.branchless:
            if "capturable" in options:
                return "its code branches on the step count", False
        # Once from a rate of zero, once not: state may begin in another way then.
        rates = [factor for factor in FACTORS if factor or not verdict.nonzero]
        trial = Trial(subject, options, dtype, rates if dtype == torch.float64 else rates[rates[0] == 0 :])
        if traced.asked_shape:
            graphs = {shape: trace(subject, shape, dtype, CPU).graph for shape in SHAPES[:4]}
            reason = trial.compare(lambda shape, graphs=graphs: for_size(graphs[shape], shape, 0))  # type: ignore[misc]
        else:
            reason = trial.compare_all(traced.graph)
        if reason is not None:
            return reason, False
    return None, traced.asked_shape
