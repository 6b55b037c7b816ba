"""One step of an optimizer's own code, whose state comes from tensors and goes back into them.

    tensors of `State`                        what the code finds, and leaves
    group 0.step            3.0               state[p]["step"] = 3, or group["step"], or self.step
    <buffer>.exp_avg        [elements]        state[p]["exp_avg"]
    <buffer>.pair_0         [elements]        state[p]["pair"] = (tensor, ...)

Tracing runs it on fake tensors (`tracing`), training on this rank's shards (`runtime.shard_update`), and the trial on
small ones. Code that keeps anything else than it kept on small parameters is `Refused`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.optim.element_wise import element_wise_only
from fsdp_compiled.optim.optimizer_copy import MISSING, Refused, attributes_of, step_of
from fsdp_compiled.optim.rule import Kept, StateTensor

Named = Mapping[str, torch.Tensor]
WORDS = {"group": "its group entry", "optimizer": "its attribute", "state": "its state"}


@dataclass(frozen=True)
class Part:
    """One group's part of a step. ``options``: as the code reads them; ``scalars``: what the group keeps once, by name;
    ``parameters``: each with its ``.grad``, and what is kept per element. ``begins``: this is the first step."""

    kept: Kept
    options: Mapping[str, Any]
    scalars: Named
    parameters: Sequence[tuple[torch.Tensor, Named]]
    begins: bool = False


def step_on_shards(optimizer: Optimizer, parts: Sequence[Part]) -> None:
    """Makes the class's step on these parts, whose parameters are `ShardParameter`s. Raises `Refused` for code that is
    not element-wise; then the step is half made."""
    views = [(parameter, parameter.detach()) for part in parts for parameter, _ in part.parameters]
    with torch.no_grad():
        make_step(optimizer, parts, number_of, element_wise_only())
    for parameter, view in views:
        if parameter.data_ptr() != view.data_ptr():  # its code bound `p.data` anew
            view.copy_(parameter.detach())
            parameter.data = view


def number_of(tensor: torch.Tensor, entry: StateTensor) -> bool | int | float:
    """The number as the code kept it. One that began as a whole number and no longer is one becomes a float."""
    value = tensor.item()
    if entry.number is bool and value in (0, 1):
        return bool(value)
    return int(value) if entry.number is int and float(value).is_integer() else value


def make_step(
    optimizer: Optimizer, parts: Sequence[Part], number: Callable[[torch.Tensor, StateTensor], Any],
    guard: AbstractContextManager[Any] | None = None,
) -> None:  # fmt: skip
    """Makes the class's step on these parts; parameters and tensors of state are written in place.

    ``number``: turns a tensor into the Python number that the code keeps; ``guard``: is around its code. Afterwards the
    optimizer is as it was before.
    """
    state: Any = defaultdict(dict)
    attributes: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    places: dict[str, Any] = {"optimizer": attributes, "state": state}
    for part in parts:
        group = {**part.options, "params": [parameter for parameter, _ in part.parameters]}
        groups.append(group)
        for entry in part.kept.state:
            if entry.scalar and entry.place in ("group", "optimizer", "state") and _is_given(part, entry):
                place = group if entry.place == "group" else places[entry.place]
                place[entry.name] = _value(part.scalars[entry.name], entry, number)
        for index, (parameter, tensors) in enumerate(part.parameters):
            if (own := _of_parameter(part, tensors, number, index > 0)) or not part.begins:
                state[parameter] = own
    held = vars(optimizer)
    names = {entry.name for part in parts for entry in part.kept.state if entry.place == "optimizer"}
    before = {name: held.get(name, MISSING) for name in names}
    own_groups, own_state = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, state
    held.update(attributes)
    try:
        noted, started = attributes_of(optimizer), [dict(group) for group in groups]
        named = {name: value for name, value in state.items() if isinstance(name, str)}
        with guard or nullcontext():
            step_of(type(optimizer))(optimizer)
        after = attributes_of(optimizer)
        state = optimizer.state
        for part, group in zip(parts, optimizer.param_groups, strict=True):
            _write_back(part, {"group": group, "optimizer": after, "state": state}, state)
        _check_kept(parts, (started, optimizer.param_groups), (noted, after), (named, state))
    finally:
        optimizer.param_groups, optimizer.state = own_groups, own_state
        for name, value in before.items():
            held.update({name: value}) if value is not MISSING else held.pop(name, None)


def _is_given(part: Part, entry: StateTensor) -> bool:
    return not part.begins or part.kept.is_there(entry)


def _value(tensor: torch.Tensor, entry: StateTensor, number: Callable[[torch.Tensor, StateTensor], Any]) -> Any:
    return number(tensor, entry) if entry.number else tensor


def _of_parameter(
    part: Part, tensors: Named, number: Callable[[torch.Tensor, StateTensor], Any], copies: bool
) -> dict[str, Any]:
    """``state[parameter]``. ``copies``: whether to copy what the group has once; the first parameter's is written."""
    kept = part.kept
    found: dict[str, Any] = {} if part.begins else dict.fromkeys(kept.empty)
    for entry in kept.state:
        if entry.place == "parameter" and _is_given(part, entry):
            given = tensors[entry.name] if not entry.scalar else part.scalars[entry.name]
            value = _value(given, entry, number)
            found[entry.name] = value.clone() if copies and value is given and entry.scalar else value
    for name, form in kept.forms:
        inside = [entry.name for entry in kept.state if entry.container == name]
        if all(label in found for label in inside):
            found[name] = pytree.tree_unflatten([found.pop(label) for label in inside], form)
    return found


def _write_back(part: Part, places: Mapping[str, Any], state: Mapping[Any, Any]) -> None:
    """Writes what the code keeps now into the tensors that it came from."""
    for entry in part.kept.state:
        if entry.place in places:
            _write(part.scalars[entry.name], places[entry.place].get(entry.name))
    known = {entry.name for entry in part.kept.state if entry.place == "parameter"}
    first = True
    for parameter, tensors in part.parameters:
        entries = _opened(part.kept, state.get(parameter, {}))
        if odd := [name for name, value in entries.items() if name not in known and value is not None]:
            raise Refused(f"its state {odd[0]!r} is made at some later step")
        for entry in part.kept.state:
            if entry.place == "parameter" and (first or not entry.scalar):
                _write(part.scalars[entry.name] if entry.scalar else tensors[entry.name], entries.get(entry.name))
        first = first and parameter.grad is None  # numbers are taken from a parameter that made the step


def _opened(kept: Kept, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter's state, in which values inside containers have names of their own."""
    found = dict(entries)
    for name, form in kept.forms:
        value = found.pop(name, None)
        if value is None and not entries:
            continue
        if value is None or pytree.tree_structure(value) != form:
            raise Refused(f"its state {name!r}, a {form.type.__name__}, does not keep its form from step to step")
        inside = [entry.name for entry in kept.state if entry.container == name]
        found |= dict(zip(inside, pytree.tree_leaves(value), strict=True))
    return found


def _write(target: torch.Tensor, value: Any) -> None:
    if value is target or value is None:
        return
    if isinstance(value, torch.Tensor):
        if target.dim() == 0 and value.shape == (1,):
            value = value.reshape(())
        if value.shape != target.shape:
            raise Refused(f"its state of shape {list(target.shape)} becomes one of shape {list(value.shape)}")
        target.copy_(value)
    elif isinstance(value, (bool, int, float)):
        target.fill_(value)
    else:
        raise Refused(f"it keeps a {type(value).__name__} in its state")


def _check_kept(
    parts: Sequence[Part],
    groups: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    attributes: tuple[Mapping[str, Any], Mapping[str, Any]],
    state: tuple[Mapping[str, Any], Mapping[Any, Any]],
) -> None:
    """Refuses code that keeps anything outside of the known state; each argument: before the step, and after."""
    known = {(entry.place, entry.name) for part in parts for entry in part.kept.state}
    own = {parameter for part in parts for parameter, _ in part.parameters}
    if any(not isinstance(key, str) and key not in own for key in state[1]):
        raise Refused("it keeps state that belongs to no parameter")
    rows = [("group", *pair) for pair in zip(*groups, strict=True)]
    for place, before, after in (*rows, ("optimizer", *attributes), ("state", *state)):
        for name, value in after.items():
            if isinstance(name, str) and (place, name) not in known and name != "params":
                if name not in before or (value is not before[name] and not _same(value, before[name])):
                    raise Refused(f"it changes {WORDS[place]} {name!r}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    try:
        return bool(one == other)
    except Exception:
        return False
