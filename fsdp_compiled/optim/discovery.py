"""Finds what state an optimizer keeps, by running it on a small parameter.

State may live in ``state[parameter]``, in the param group (``group["step"] += 1``) or in attributes of the optimizer.
An entry of the parameter's shape is state per element; a number is one for the whole group.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.optim.optimizer_copy import (
    OWN,
    Refused,
    all_leaves,
    attributes_of,
    copied,
    copy_of,
    fresh_of,
    has_stepped,
    is_container,
    named_leaves,
    named_state,
    step_of,
)
from fsdp_compiled.optim.rule import Kept, Location, StateTensor

SHAPE = (2, 3)
NUMBERS = (bool, int, float)


class _FirstWritten(dict[str, Any]):
    """Remembers each entry as it was first set, before the update changes it in place."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.initial: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.initial and name not in self and value is not None:
            self.initial[name] = copied(value)
        super().__setitem__(name, value)

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]


class _FirstState(defaultdict[Any, Any]):
    """An optimizer's state, which remembers in the same way the entries that are kept in it by name."""

    def __init__(self, parameter: torch.Tensor, entries: dict[str, Any]) -> None:
        super().__init__(dict)
        self.initial: dict[str, Any] = {}
        super().__setitem__(parameter, entries)

    def __setitem__(self, name: Any, value: Any) -> None:
        if isinstance(name, str) and name not in self and value is not None:
            self.initial[name] = copied(value)
        super().__setitem__(name, value)


def discover(optimizer: Optimizer, options: Mapping[str, Any], dtype: torch.dtype) -> tuple[Kept, bool]:
    """What it keeps, and whether some of that starts from the parameter or the gradient, not from a constant.

    Raises `Refused` if it keeps something that cannot be kept in shards.
    """
    parameter = nn.Parameter(torch.tensor([[1.0, -3.0, 0.5], [2.0, -0.25, 1.5]], dtype=dtype))
    begun = fresh_of(optimizer, options, nn.Parameter(parameter.detach().clone()))
    started = dict(next(iter(begun.state.values()), {})) if begun is not None else {}
    entries = _FirstWritten()
    for name, value in started.items():
        entries[name] = copy.deepcopy(value)
    group = _FirstWritten({**options, "params": [parameter]})
    state = _FirstState(parameter, entries)
    for name, value in named_state(optimizer).items():
        state[name] = value
    made = copy_of(optimizer, [group], state)
    made.param_groups = [group]
    before = (copy.deepcopy({**group, "params": []}), copy.deepcopy(_comparable(made)))
    changed: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for step in range(8):
        parameter.grad = torch.tensor([[0.5, 2.0, -1.0], [0.25, 1.0, -0.125]], dtype=dtype) * (1 + step)
        step_of(type(made))(made)
        for found, was, now in zip(changed, before, (group, _comparable(made)), strict=True):
            for name, value in now.items():
                if name != "params" and not equal(value, was.get(name)):
                    found.setdefault(name, was.get(name, value))
    others = {name: value for name, value in state.items() if isinstance(name, str)}
    if len(state) > 1 + len(others):
        raise Refused("it keeps state that belongs to no parameter")
    first = {name: value for name, value in entries.initial.items() if name in entries}
    if odd := [name for name in first if not (isinstance(name, str) and name.isidentifier())]:
        raise Refused(f"its state goes by {odd[0]!r}, which is no name")
    result = [entry for name, value in first.items() for entry in _of_parameter(name, value, entries[name], dtype)]
    for place, values, begin in (
        ("group", changed[0], group.initial),
        ("optimizer", changed[1], {}),
        ("state", others, state.initial),
    ):
        for name, value in values.items():
            begins = begin.get(name, value)
            result.append(_one(name, begins, place, {entry.name for entry in result}))  # type: ignore[arg-type]
    starts = any(
        isinstance(value, torch.Tensor) and value.numel() > 1 and not bool((value == value.flatten()[0]).all())
        for value in all_leaves(entries.initial).values()
    )
    empty = tuple(name for name, value in entries.items() if value is None and isinstance(name, str))
    forms = tuple((name, pytree.tree_structure(value)) for name, value in first.items() if is_container(value))
    there = {("group", name) for name in options} | {("optimizer", name) for name in attributes_of(optimizer)}
    there |= {("state", name) for name in named_state(optimizer)}
    return Kept(tuple(result), tuple(started), empty, forms, frozenset(there)), starts


def begin_of(optimizer: Optimizer, options: Mapping[str, Any], fresh: Optimizer | None) -> dict[str, Any]:
    """The options as they were before the first step, for an optimizer that has made some steps."""
    if fresh is None or not has_stepped(optimizer):
        return dict(options)
    new = fresh.param_groups[0]
    given = set(type(optimizer).__init__.__code__.co_varnames) if hasattr(type(optimizer).__init__, "__code__") else ()
    return {name: new.get(name, value) if name not in given else value for name, value in options.items()}


def equal(one: Any, other: Any) -> bool:
    """Whether two values that a program may keep are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict | list | tuple) and type(one) is type(other) and len(one) == len(other):
        if isinstance(one, dict):
            return all(key in other and equal(value, other[key]) for key, value in one.items())
        return all(map(equal, one, other))
    try:
        return one is other or bool(one == other)
    except Exception:
        return False


def _comparable(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes that are values, not objects whose equality says nothing."""
    kinds = (*NUMBERS, str, torch.Tensor, dict, list, tuple, type(None))
    return {name: value for name, value in attributes_of(optimizer).items() if isinstance(value, kinds)}


def _of_parameter(name: str, first: Any, last: Any, dtype: torch.dtype) -> list[StateTensor]:
    """What is kept under a name of the parameter's state: one value, or as many as its container holds."""
    if not is_container(first):
        return [_leaf(name, first, dtype)]
    if pytree.tree_structure(first) != pytree.tree_structure(last):
        raise Refused(f"its state {name!r}, a {type(first).__name__}, does not keep its form from step to step")
    return [replace(_leaf(label, leaf, dtype), container=name) for label, leaf in named_leaves(name, first).items()]


def _leaf(name: str, value: Any, dtype: torch.dtype) -> StateTensor:
    if type(value) in NUMBERS:
        return _number(name, value, "parameter", set())
    if not isinstance(value, torch.Tensor):
        raise Refused(f"its state {name!r} is a {type(value).__name__}")
    kind = None if value.dtype == dtype else value.dtype
    if is_one(value):
        return StateTensor(name, True, value.item(), value.dtype)
    if tuple(value.shape) != SHAPE:
        raise Refused(f"its state {name!r} has shape {list(value.shape)} for a parameter of shape {list(SHAPE)}")
    first = value.flatten()[0]
    # State that starts from the parameter or the gradient starts from zero here, and has a first step of its own.
    return StateTensor(name, False, first.item() if bool((value == first).all()) else 0.0, kind)


def _one(name: str, value: Any, place: Location, taken: set[str]) -> StateTensor:
    """The entry for a number, or a tensor of one number, that is kept in this place."""
    if type(value) in NUMBERS:
        return _number(name, value, place, taken)
    if not is_one(value):
        label = {"group": "its group entry", "optimizer": "its attribute"}.get(place, "its state")
        raise Refused(f"it changes {label} {name!r}, a {type(value).__name__}")
    if name in taken:
        raise Refused(f"it keeps {name!r} in two places")
    return StateTensor(name, True, value.item(), value.dtype, place)


def is_one(value: Any) -> bool:
    """Whether this is a tensor of one number."""
    return isinstance(value, torch.Tensor) and tuple(value.shape) in ((), (1,))


def _number(name: str, value: Any, place: Location, taken: set[str]) -> StateTensor:
    if name in taken or (place == "optimizer" and name in OWN):
        raise Refused(f"it keeps {name!r} in two places")
    return StateTensor(name, True, float(value), torch.float64, place, number=type(value))
