"""Finds the way in which an optimizer updates shards. Each way is tried against the optimizer itself, once for each
class, options and attributes, before it is believed.

    a class of torch.optim        traced, in its plain form or in that for CUDA graphs (`tracing`)
    any other                     as it is, its own step on the shards (`step`)
    where neither is right        `Refused`; see `whole`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from fsdp_compiled.optim.discovery import begin_of, discover
from fsdp_compiled.optim.element_wise import PointwiseOnly, ShardParameter
from fsdp_compiled.optim.hyperparameters import options_of, with_hyper
from fsdp_compiled.optim.optimizer_copy import (
    Refused,
    attributes_of,
    code_of,
    copy_of,
    fresh_of,
    is_plain,
    meaning,
    plain_options,
    step_of,
)
from fsdp_compiled.optim.rule import Kept, RuleInput, StateTensor, inputs_of
from fsdp_compiled.optim.step import Part, step_on_shards
from fsdp_compiled.optim.tracing import Subject, trace
from fsdp_compiled.optim.trial import FACTORS, Trial

CPU = torch.device("cpu")
OTHERS = "its class is not one of torch.optim's"


@dataclass(frozen=True)
class Way:
    """How an optimizer's group is updated, as its trial found. ``eagerly``: why it is not traced."""

    kept: Kept
    eagerly: str | None
    capturable: bool = False
    nonzero: bool = False  # whether its code divides by the rate

    def subject(self, optimizer: Optimizer, options: Mapping[str, Any], values: Mapping[str, float]) -> Subject:
        options = {**options, "capturable": True} if self.capturable else options
        return Subject(optimizer, options, values, self.kept, self.capturable)


_FOUND: dict[Any, Any] = {}  # a `Way` or a `Refused`, by class, options and attributes


def once(key: Any, judge: Callable[[], Any]) -> Any:
    """The result or refusal of ``judge``, asked once for each key; asked every time if the key is None."""
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


def way_of(optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype) -> Way:
    """The way for parameters of this dtype; ``values``: of the scheduled hyperparameters. Raises `Refused`."""
    noted = noted_by(group["params"])
    key = key_of(optimizer, group, values, dtype) if is_of_torch(optimizer) or not noted else None
    return once(key, lambda: _judge(optimizer, group, values, dtype, noted))  # type: ignore[no-any-return]


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether its update is the code of a class of `torch.optim`, with nothing replaced."""
    kind = type(optimizer)
    bases = kind.__mro__[: kind.__mro__.index(Optimizer)]
    own = all(f"{base.__module__}.".startswith("torch.optim.") for base in bases)
    code = step_of(kind), *(value for value in attributes_of(optimizer).values() if callable(value))
    return own and all(f"{getattr(one, '__module__', '')}.".startswith("torch.optim.") for one in code)


def noted_by(parameters: Iterable[torch.Tensor]) -> frozenset[str]:
    """The attributes that somebody other than this package put on parameters."""
    names = {name for parameter in parameters for name in vars(parameter)}
    return frozenset(name for name in names if not name.startswith("_sharded") and name != "_is_param")


def key_of(optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype) -> Any:
    """What a trial's outcome depends on; None if that cannot be said, as for code that reads from elsewhere."""
    options = {name: value for name, value in options_of(group).items() if name not in values}
    attributes = attributes_of(optimizer)
    if not is_of_torch(optimizer) or not is_plain((options, attributes)):
        return None
    signs = tuple((name, value == 0, value > 0) for name, value in values.items())
    return code_of(optimizer), repr(sorted(options.items())), repr(sorted(attributes.items())), signs, dtype


def _judge(
    optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, float], dtype: torch.dtype,
    noted: frozenset[str],
) -> Way:  # fmt: skip
    """Finds the way. Raises `Refused`, whatever the optimizer's code fails with."""
    options = plain_options(options_of(group))
    example = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    options = begin_of(optimizer, options, fresh_of(optimizer, options, example))
    reasons: list[str] = []
    for traced in (True, False) if is_of_torch(optimizer) else (False,):
        try:
            with torch.no_grad():
                for way in _ways(optimizer, options, values, dtype, reasons[0] if reasons else OTHERS, traced):
                    try:
                        return _tried(optimizer, options, values, way, dtype, noted)
                    except Refused as error:
                        reasons.append(str(error))
        except Refused as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(str(meaning(error, "its step fails on small parameters")))
    raise Refused(reasons[-1])


def _ways(
    optimizer: Optimizer, options: dict[str, Any], values: Mapping[str, float], dtype: torch.dtype, reason: str,
    traced: bool,
) -> list[Way]:  # fmt: skip
    """The ways, in the order in which they are tried."""
    kept, starts = discover(optimizer, options, dtype)
    first = StateTensor("first", True, 1.0, torch.float64, "ours")
    begins = replace(kept, state=(*kept.state, first))
    if not traced:  # if the state does not start from constants, the first step makes it
        rated = _from_rate(optimizer, options, values, dtype, kept)
        return [Way(one, reason) for one in ((begins,) if starts or rated else (kept, begins))]
    if rated := _from_rate(optimizer, options, values, dtype, kept):
        state = [replace(entry, from_rate=entry.name in rated) for entry in kept.state]
        kept = replace(begins, state=(*state, first))
    if any(entry.name == "momentum_buffer" for entry in kept.state) and options.get("dampening", 0) != 0:
        if step_of(type(optimizer)) is step_of(torch.optim.SGD):
            undamped = StateTensor("undamped", True, 1.0, torch.float64, "ours")
            kept = replace(kept, state=(*kept.state, undamped))
    ways = [Way(kept, None)]
    if "capturable" in options:
        wide = [replace(entry, dtype=torch.float64) if entry.scalar else entry for entry in kept.state]
        ways.append(Way(replace(kept, state=tuple(wide)), None, capturable=True))
    return ways


def _from_rate(
    optimizer: Optimizer, options: dict[str, Any], values: Mapping[str, float], dtype: torch.dtype, kept: Kept
) -> set[str]:
    """The entries that begin with the rate of the first step, as Rprop's step sizes do."""
    other = options
    for name, value in values.items():
        other = with_hyper(other, name, value * 0.75 or 0.1)
    elsewhere = {entry.name: entry.initial for entry in discover(optimizer, other, dtype)[0].state}
    return {e.name for e in kept.state if e.name not in values and e.initial != elsewhere.get(e.name)}


def _tried(
    optimizer: Optimizer, options: Mapping[str, Any], values: Mapping[str, float], way: Way, dtype: torch.dtype,
    noted: frozenset[str],
) -> Way:  # fmt: skip
    """The way, if it does what the optimizer does; otherwise raises `Refused`."""
    subject = way.subject(optimizer, options, values)
    wide = way.eagerly is not None and dtype != torch.float64  # in which rounding is nothing
    try:
        for one in (torch.float64, dtype) if wide else (dtype,):
            # Once from a rate of zero, once not: state may begin in another way then.
            rates = [factor for factor in FACTORS if factor or not way.nonzero]
            trial = Trial(subject, options, one, rates if one == torch.float64 else rates[rates[0] == 0 :])
            update = as_it_is(subject, noted) if way.eagerly is not None else _module(trace(subject, one, CPU))
            if (difference := trial.compare(update)) is not None:
                raise Refused(f"on flat shards it does not do what it does on parameters: {difference}")
    except ZeroDivisionError:
        if way.nonzero:
            raise
        return _tried(optimizer, options, values, replace(way, nonzero=True), dtype, noted)
    except Refused:
        raise
    except Exception as error:
        raise meaning(error, "its step fails on flat shards") from error
    return way


def _module(graph: fx.Graph) -> Callable[..., None]:
    """The graph as a function, in which an operator that is not element-wise raises `Refused`."""
    module = fx.GraphModule(nn.Module(), graph)

    def update(*tensors: torch.Tensor) -> None:
        with PointwiseOnly():
            module(*tensors)

    return update


def as_it_is(subject: Subject, noted: frozenset[str] = frozenset()) -> Callable[..., None]:
    """The optimizer's own step over a rule's inputs, as `runtime.shard_update` makes it. ``noted``: attributes of
    parameters."""
    made = copy_of(subject.optimizer, [{"params": []}], {})
    inputs = inputs_of(subject.kept.state, subject.hypers)

    def update(*tensors: torch.Tensor) -> None:
        given = dict(zip(inputs, tensors, strict=True))
        group: Mapping[str, Any] = subject.options
        for name in subject.hypers:
            group = with_hyper(group, name, float(given[RuleInput("hyper", name)]))
        parameter = ShardParameter(given[RuleInput("parameter")])
        parameter.noted = noted.__contains__
        parameter.grad = given[RuleInput("gradient")]
        state = {entry.name: given[RuleInput("state", entry.name)] for entry in subject.kept.state}
        first = state.get("first")
        begins = first is not None and bool(first)
        step_on_shards(made, [Part(subject.kept, group, state, [(parameter, state)], begins)])
        if first is not None:
            first.zero_()

    return update
