"""The user's own class of aux raises on rank 1, when a call has been made; see ``ranks.py``, whose ``main`` runs it.

torchrun --nproc-per-node 2 aux_fails.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.capture.captured import Capture
from tests.workers.ranks import RANK, main


class Noted:
    """What the loss returns beside its value."""

    def __init__(self, mean: torch.Tensor) -> None:
        self.mean = mean


pytree.register_pytree_node(Noted, lambda value: ([value.mean], None), lambda values, _: Noted(*values))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Noted:
        return Noted(torch.dropout(self.linear(x), 0.5, True))


def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Noted]:
    y = model(x).mean
    return y.square().mean(), Noted(y.mean())


def build() -> Sharded:
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + RANK))


def failing(here: bool) -> AbstractContextManager[Any]:
    """Inside, what a program returns cannot be put together; a class that raised now would be seen by the guards."""
    wrong = mock.Mock(side_effect=LookupError("cannot be put together"))
    return mock.patch.object(Capture, "rebuild", wrong) if here else nullcontext()


def calls(name: str, fails_on: int | None) -> dict[str, Any]:
    """A step, the call, two more calls and a step; the second call fails on that rank."""
    torch.manual_seed(3)
    sharded, errors = build(), []
    made: list[Any] = []

    def call(step: int) -> None:
        x = batch(step)
        if name == "apply":
            made.append(sharded.apply(sharded.state, x)[1])
        else:
            made.append(getattr(sharded, name)(x))

    sharded.step(batch(0))
    for step in range(1, 4):
        with failing(step == 2 and fails_on == RANK):
            try:
                call(step)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    sharded.step(batch(4))
    weights = [value.tolist() for value in sharded.full_state_dict().values()]
    state = [value.tolist() for value in sharded.state.optimizer.values()]
    return {"errors": errors, "made": len(made), "weights": weights, "state": state, "step": int(sharded.state.step)}


def both(name: str) -> dict[str, Any]:
    """With a failure on rank 1, and the control without."""
    return {"failed": calls(name, 1), "control": calls(name, None)}


CASES = {name: partial(both, name) for name in ("step", "apply", "accumulate", "value_and_grad", "__call__")}

if __name__ == "__main__":
    main(CASES)
