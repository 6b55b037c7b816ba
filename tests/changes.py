"""What forward reads is something else later: a model's steps here, and eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_compiled import compile_sharded
from tests.toys import EAGER, squares


def beside(model: nn.Module, eager: nn.Module, *changes: Callable[[], Any]) -> tuple[list[float], list[float], int]:
    """Losses of two steps, of one after each change and of a last one, in eager PyTorch and here, on equal weights
    that stay as they are; and how often a step was captured."""
    eager.load_state_dict(model.state_dict())
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.0), loss=squares, policy=EAGER)
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    found: tuple[list[float], list[float]] = [], []
    for change in (nothing, nothing, *changes, nothing):
        change()
        found[0].append(squares(eager, x).item())
        found[1].append(float(sharded.step(x)))
    return *found, sharded.captures


def nothing() -> None:
    pass
