"""A slice of a module list, made anew at each forward: what changes of it between steps is seen."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.repeated_models import LAYERS, Model, loss

TOKENS = torch.zeros(2, 3, dtype=torch.long)


def sharded_of(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))


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
