"""What `fully_shard` notes on a module, and whether the model's own code is being traced.

A module that is called goes its own way (`module_call`), and the same module inside of a model that is traced is a part
of that program: the class that `fully_shard` gives it asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.fsdp.merged_units import merge
from fsdp_compiled.runtime.fsdp.parameter_group import ParameterGroup

STATE = "_fsdp_compiled"  # the attribute
_tracing = [0]
PLAIN = Policy(lower="eager")  # where none is given


@dataclass(eq=False)
class ModuleState:
    """One module that `fully_shard` was called on. ``calls``: by the name of the method, what runs it. ``gathered``:
    between gathers of many calls together and their end, what refuses those that would not mean what they say."""

    group: ParameterGroup
    policy: Policy | None
    merging: str = ""  # how small modules inside were merged, for people
    calls: dict[str, Any] = field(default_factory=dict)
    gathered: Callable[[], None] | None = None


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get(STATE)


def states_in(module: nn.Module) -> list[ModuleState]:
    """Of the module and those inside that `fully_shard` was called on, in their order."""
    return [state for one in module.modules() if (state := state_of(one)) is not None]


@torch.compiler.assume_constant_result
def tracing() -> bool:
    """Whether a model is being traced by this package; a constant for the trace, and no guard of it."""
    return bool(_tracing[0])


@contextmanager
def traced() -> Iterator[None]:
    _tracing[0] += 1
    try:
        yield
    finally:
        _tracing[0] -= 1


def lay_out(module: nn.Module) -> None:
    """Lays small neighbours among what was marked inside side by side, so that they are gathered together."""
    states = states_in(module)
    policy = next((state.policy for state in states if state.policy is not None), PLAIN)
    states[0].merging = merge(module, list(dict.fromkeys(state.group for state in states)), policy)
