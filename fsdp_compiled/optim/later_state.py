"""Whether an optimizer that was changed after its first steps can go on with the state that it has made.

RMSprop looks for ``grad_avg`` once ``centered`` is set, and fails, since its first step made none; SGD makes its
momentum where it finds none. Which it is, its own code says: it makes one step on what was kept before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.optim.discovery import SHAPE
from fsdp_compiled.optim.groups import options_of
from fsdp_compiled.optim.rule import Rule, StateTensor
from fsdp_compiled.optim.twin import named_state, plain_options, step_of, twin_of


def check_goes_on(optimizer: Optimizer, group: Mapping[str, Any], old: Rule, new: Rule) -> None:
    """Raises ``ValueError`` where the code fails on the state that ``old`` has, which ``new`` has more of."""
    before = {entry.name for entry in old.state}
    more = sorted(entry.name for entry in new.state if entry.name not in before)
    try:
        _step(optimizer, plain_options(options_of(group)), old.state)
    except Exception as error:
        raise ValueError(
            f"{old.name} was changed after its first steps, and now looks for state that they did not make "
            f"({', '.join(more)}): on what it has it fails, {type(error).__name__}: {error}. Put the change back, or "
            "make it before compile_sharded."
        ) from error


@torch.no_grad()
def _step(optimizer: Optimizer, options: dict[str, Any], state: Sequence[StateTensor]) -> None:
    """One step of its own code on a small parameter that has this state, some steps old."""
    dtype = torch.float64
    parameter = nn.Parameter(torch.ones(SHAPE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    if any(entry.container for entry in state):
        raise KeyError("it keeps state in containers, which are laid out once")
    places: dict[str, dict[str, Any]] = {"parameter": {}, "group": {**options, "params": [parameter]}}
    places |= {"state": named_state(optimizer), "optimizer": {}, "ours": {}}
    for entry in state:
        places[entry.place][entry.name] = _value(entry, dtype)
    kept = defaultdict(dict, {parameter: places["parameter"], **places["state"]})
    twin = twin_of(optimizer, [places["group"]], kept, places["optimizer"])
    step_of(type(twin))(twin)


def _value(entry: StateTensor, dtype: torch.dtype) -> Any:
    """Not what it begins with: code that asks whether it is the first step must see that it is not."""
    if not entry.scalar:
        return torch.full(SHAPE, entry.initial, dtype=entry.dtype or dtype)
    value = entry.initial + 1
    if entry.number:
        return int(value) if value == int(value) else value
    return torch.tensor(value, dtype=entry.dtype or dtype)
