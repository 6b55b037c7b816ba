"""Two equal trainings to compare: one whose programs run as graphs on a stand-in for a GPU, and one without."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, Sharded, api, compile_sharded
from fsdp_compiled.lower.cuda_graph import WARM, Replays
from fsdp_compiled.runtime.programs.program_maker import ProgramMaker
from tests.standin import Plain, StandIn
from tests.toys import EAGER, batches, mse


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def small(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 2))


_DEVICES: weakref.WeakKeyDictionary[Sharded, StandIn] = weakref.WeakKeyDictionary()


def compiled_with(replays: Replays, *given: Any, **options: Any) -> Sharded:
    """What `compile_sharded` makes of these arguments, with these graphs in the place of its device's."""
    with mock.patch.object(api, "ProgramMaker", partial(ProgramMaker, replays=replays)):
        sharded = compile_sharded(*given, **options)
    if isinstance(replays.device, StandIn):
        _DEVICES[sharded] = replays.device
    return sharded


def make(
    graphs: bool | StandIn,
    policy: Policy = EAGER,
    optimizer: Callable[..., Any] = adamw,
    wanted: Any = "auto",
    **options: Any,
) -> Sharded:
    """One of two equal ones, with graphs, on this stand-in or a new one, and without. Each size has its graph."""
    if policy.dynamic == "auto":
        policy = replace(policy, dynamic=False)
    model = small(**options)
    device = graphs if isinstance(graphs, StandIn) else StandIn()
    return compiled_with(
        Replays(device, wanted) if graphs else Plain(), model, optimizer(model), loss=mse, policy=policy
    )


def stand_in(sharded: Sharded) -> StandIn:
    """The device that its graphs run on."""
    return _DEVICES[sharded]


def same(left: Any, right: Any) -> bool:
    return all(map(torch.equal, pytree.tree_leaves(left), pytree.tree_leaves(right)))


def refuses_the_graph(sharded: Sharded, why: str) -> tuple[torch.Tensor, ...]:
    """Where a graph was asked for, its first launch is this error, and nothing is written. Returns that batch."""
    *data, last = batches(WARM + 1)
    for batch in data:
        sharded.step(*batch)
    before = pytree.tree_map(torch.clone, sharded.state)
    with pytest.raises(ValueError, match=rf"cuda_graph is True, but step .* {why}"):
        sharded.step(*last)
    assert same(before, sharded.state)
    return last
