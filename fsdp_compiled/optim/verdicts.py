"""How an optimizer is traced so that it is believed: each form of its code is tried against the optimizer itself, once
for each class, options and attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.discovery import Discovered, begin_of, discover
from fsdp_compiled.optim.groups import options_of, with_hyper
from fsdp_compiled.optim.nested import Form
from fsdp_compiled.optim.outside import Outside
from fsdp_compiled.optim.rule import StateTensor
from fsdp_compiled.optim.rule_graph import for_size
from fsdp_compiled.optim.scalars import Forks
from fsdp_compiled.optim.tracing import Subject, trace
from fsdp_compiled.optim.trial import FACTORS, SHAPES, Trial
from fsdp_compiled.optim.twin import (
    Refused,
    Untraceable,
    attributes_of,
    fresh_of,
    meaning,
    plain_options,
    step_of,
)  # fmt: skip

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


_FOUND: dict[Any, Any] = {}  # a `Verdict` or a `Refused`, by class, options and attributes


def once(key: Any, judge: Callable[[], Any]) -> Any:
    """What ``judge`` says or refuses, asked once for each key; every time where that is None."""
    found = _FOUND.get(key) if key is not None else None
    if found is None:
        try:
            found = judge()
        except Refused as error:
            found = error.with_traceback(None)
        if key is not None:
            _FOUND[key] = found
    if isinstance(found, Refused):
        raise type(found)(str(found))
    return found


def verdict_of(
    optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype
) -> Verdict:
    key = key_of(optimizer, group, values, dtype)
    return once(key, lambda: _judge(optimizer, group, values, dtype))  # type: ignore[no-any-return]


def key_of(optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype) -> Any:
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
            kept, rated = _discovered(optimizer, options, values, dtype)
            state = kept.state
            damped = any(entry.name == "momentum_buffer" for entry in state) and options.get("dampening", 0) != 0
            if damped and step_of(type(optimizer)) is step_of(torch.optim.SGD):
                state = (*state, StateTensor("undamped", True, 1.0, torch.float64, "ours"))
            verdict = Verdict(state, kept.started, kept.empty, kept.forms, False, False, False)
            reasons = []
            for one in _forms(verdict, options, own, rated or (kept.begun and not own)):
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


def _discovered(
    optimizer: Optimizer, options: dict[str, Any], values: Mapping[str, float], dtype: torch.dtype
) -> tuple[Discovered, bool]:
    """What it keeps, and whether that begins with a rate, as Rprop's steps do: with what that is at the first step."""
    kept = discover(optimizer, options, dtype)
    other = options
    for name, value in values.items():
        other = with_hyper(other, name, value * 0.75 or 0.1)
    begins, elsewhere = (
        {entry.name: entry.initial for entry in state if entry.name not in values}
        for state in (kept.state, discover(optimizer, other, dtype).state)
    )
    return kept, begins != elsewhere


def _forms(verdict: Verdict, options: Mapping[str, Any], own: bool, first_only: bool) -> list[Verdict]:
    """In which an optimizer's code is traced, in the order they are tried; ``first_only``: its state starts from what
    only the first step knows."""
    forms = [verdict]
    if own and "capturable" in options:
        wide = tuple(
            replace(entry, dtype=torch.float64) if entry.scalar else entry for entry in verdict.state
        )  # fmt: skip
        forms.append(replace(verdict, state=wide, branchless=True))
    first = StateTensor("first", True, 1.0, torch.float64, "ours")
    begun = [replace(form, state=(*form.state, first), first=True) for form in forms]
    return begun if first_only else [*forms, begun[0]]


def _try(
    optimizer: Optimizer, options: Mapping[str, Any], values: Mapping[str, float], verdict: Verdict,
    dtypes: Sequence[torch.dtype],
) -> tuple[str | None, bool]:  # fmt: skip
    """Why this form is not believed, or None, and whether the code asks for shapes."""
    subject = subject_of(optimizer, options, values, verdict)
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


def subject_of(
    optimizer: Optimizer, options: Mapping[str, Any], values: Mapping[str, float], verdict: Verdict
) -> Subject:
    if verdict.branchless:
        options = {**options, "capturable": True}
    return Subject(
        optimizer, options, values, verdict.state, verdict.started, verdict.empty, verdict.forms, verdict.branchless,
        verdict.first,
    )  # fmt: skip
