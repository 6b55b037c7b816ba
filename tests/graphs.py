"""Two equal trainings to compare: one whose programs run as graphs on a stand-in for a GPU, and one without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.standin import Plain, StandIn
from tests.toys import EAGER, mse


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def small(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 2))


def make(graphs: bool, policy: Policy = EAGER, optimizer: Callable[..., Any] = adamw, **options: Any) -> Sharded:
    """One of two equal ones, with graphs and without."""
    model = small(**options)
    sharded = compile_sharded(model, optimizer(model), loss=mse, policy=policy)
    if graphs:
        sharded._programs.replays.device = StandIn()
    else:
        sharded._programs.replays = Plain()
    return sharded


def stand_in(sharded: Sharded) -> StandIn:
    assert isinstance(sharded._programs.replays.device, StandIn)
    return sharded._programs.replays.device


def same(left: Any, right: Any) -> bool:
    return all(map(torch.equal, pytree.tree_leaves(left), pytree.tree_leaves(right)))
