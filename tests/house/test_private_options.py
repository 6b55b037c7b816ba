"""Options that an optimizer keeps in private attributes decide what it does, and so whether it is believed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded


class Mine(torch.optim.Optimizer):
    """Where ``normed``, gradients are divided by the norm of all of them, which no shard and no owner knows."""

    def __init__(self, parameters: Any, normed: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._normed = normed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.cat([parameter.grad.flatten() for parameter in group["params"]]).norm() if self._normed else 1
            for parameter in group["params"]:
                gradient = parameter.grad / norm
                parameter.add_(gradient, alpha=-group["lr"])


def test_one_that_was_believed_says_nothing_of_another() -> None:
    for normed in (False, True):
        model = nn.Linear(4, 4)
        optimizer = Mine(model.parameters(), normed)
        if not normed:
            compile_sharded(model, optimizer, loss=nn.Module.__call__, policy=Policy(lower="eager"))
            continue
        weight = model.weight
        with pytest.raises(ValueError, match="Mine is not supported: its step"):
            compile_sharded(model, optimizer, loss=nn.Module.__call__, policy=Policy(lower="eager"))
        assert model.weight is weight and not weight.is_meta  # it was not taken over
