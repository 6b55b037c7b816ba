"""What an optimizer's functions read outside of it, and that changes between steps: followed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from tests.toys import squares

SCALE = 1.0
TABLE = {"decay": 0.1}
WEIGHT = torch.tensor(1.0)


class Settings:
    power = 1.0


def _way(g: torch.Tensor) -> torch.Tensor:
    return g * SCALE


def _sign(g: torch.Tensor) -> torch.Tensor:
    return g.sign()


def make(factor: float) -> tuple[type[optim.Optimizer], Callable[[float], None]]:
    """A class that closes over a number, and what sets that."""

    class Mine(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * TABLE["decay"])
                    p.add_(_way(p.grad) * factor**Settings.power, alpha=-group["lr"])

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return Mine, set_factor


def test_what_functions_read_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, set_factor = make(0.5)
    here = sys.modules[__name__]
    changes: dict[str, Callable[[], Any]] = {
        f"{__name__}.SCALE": lambda: monkeypatch.setattr(here, "SCALE", 3.0),
        f"{__name__}.TABLE": lambda: monkeypatch.setitem(TABLE, "decay", 2.0),
        f"{__name__}._way": lambda: monkeypatch.setattr(here, "_way", _sign),
        "Settings.power": lambda: monkeypatch.setattr(Settings, "power", 3.0),
        "factor of make.<locals>.Mine.step": lambda: set_factor(0.25),
    }
    torch.manual_seed(0)
    eager, model = nn.Linear(6, 3), nn.Linear(6, 3)
    model.load_state_dict(eager.state_dict())
    theirs, mine = kind(eager.parameters()), kind(model.parameters())  # type: ignore[call-arg]
    sharded = compile_sharded(model, mine, loss=squares, policy=Policy(lower="eager", shard="zero1"))
    for name, change in {"": lambda: None, **changes}.items():
        change()
        for _ in range(2):
            batch = torch.randn(4, 6)
            theirs.zero_grad()
            squares(eager, batch).backward()
            theirs.step()
            sharded.step(batch)
        found = sharded.full_state_dict()
        assert all(torch.allclose(found[key], value, atol=1e-7) for key, value in eager.state_dict().items()), name
    assert sharded.captures == 1
