"""A slice of a module list, made anew at each forward, is filled at once while Dynamo looks.

To torch 2.13: later ones walk through the filling, which gives the same and takes longer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture.blocks import repeated_calls
from tests.repeated_models import LAYERS, Model, loss

TOKENS = torch.zeros(2, 3, dtype=torch.long)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each method of a module that Dynamo came to, whether it filled a list."""
    found: list[bool] = []
    real = repeated_calls.extended

    def extended(*given: Any) -> Any:
        made = real(*given)
        found.append(made is not None)
        return made

    monkeypatch.setattr(repeated_calls, "extended", extended)
    return found


def sharded_of(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="Dynamo of torch 2.14 comes to += by another method: walked")
@pytest.mark.parametrize("like", ["a slice", "a slice backwards", "a new list"])
def test_a_list_is_filled_at_once(like: str, filled: list[bool]) -> None:
    sharded_of(Model(like)).step(TOKENS)
    assert sum(filled) == 1 + (like == "a slice backwards")


def test_what_changes_between_steps_is_seen() -> None:
    """How long the slice is, and a hook that sees each module which a list registers."""
    torch.manual_seed(0)
    model = Model("a slice")
    eager = copy.deepcopy(model)
    sharded = sharded_of(model)

    def steps() -> None:
        for depth in (LAYERS, LAYERS - 2):
            model.depth = eager.depth = depth
            assert sharded.value_and_grad(TOKENS)[0] == loss(eager, TOKENS)

    def bounded(owner: nn.Module, name: str, module: Any) -> nn.Module | None:
        return nn.Sequential(module, nn.Hardtanh(-0.01, 0.01)) if name == "3" else None

    steps()
    before = loss(eager, TOKENS)
    hook = nn.modules.module.register_module_module_registration_hook(bounded)
    try:
        assert loss(eager, TOKENS) != before
        steps()
    finally:
        hook.remove()
    steps()
