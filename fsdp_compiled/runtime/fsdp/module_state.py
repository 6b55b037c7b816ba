"""The state that `fully_shard` keeps on a module, and whether the model's own code is being traced.

A module that is called by the user runs its own programs (`module_call`). The same module inside a model that is being
traced is a part of that program. The class that `fully_shard` gives it uses `tracing` to tell the two apart.
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

STATE = "_fsdp_compiled"  # the module's attribute that holds its `ModuleState`
_tracing = [0]
PLAIN = Policy(lower="eager")  # where the user gives no policy


@dataclass(eq=False)
class ModuleState:
    """The state of one module that `fully_shard` was called on. ``calls``: the `ModuleCall` of each method, by its
    name. ``gathered``: inside ``gathered()``, a check that raises for calls that are not allowed there; None outside of
    it."""

    group: ParameterGroup
    policy: Policy | None
    merging: str = ""  # how small modules inside were merged, as text for people
    calls: dict[str, Any] = field(default_factory=dict)
    gathered: Callable[[], None] | None = None


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get(STATE)


def states_in(module: nn.Module) -> list[ModuleState]:
    """The states of all modules inside this one, itself included, that `fully_shard` was called on, in module order."""
    return [state for one in module.modules() if (state := state_of(one)) is not None]


@torch.compiler.assume_constant_result
def tracing() -> bool:
    """Whether this package is tracing a model. The trace takes it as a constant, without a guard."""
    return bool(_tracing[0])


@contextmanager
def traced() -> Iterator[None]:
    _tracing[0] += 1
    try:
        yield
    finally:
        _tracing[0] -= 1


def lay_out(module: nn.Module) -> None:
    """Lays flat shards of small neighbouring marked modules side by side, so that they are gathered together."""
    states = states_in(module)
    policy = next((state.policy for state in states if state.policy is not None), PLAIN)
    states[0].merging = merge(module, list(dict.fromkeys(state.group for state in states)), policy)
