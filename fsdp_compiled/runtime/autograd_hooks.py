"""Refuses hooks that autograd would call and a compiled program does not. Each error names what does the same.

Forward hooks and forward-pre hooks, of one module or global, are traced with the model and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module

from fsdp_compiled.capture.global_modes import is_tracker
from fsdp_compiled.torch_private.names import there

ON_PARAMETER = (
    "A program calls no hooks on parameters. To change a gradient, register a parametrization of the module "
    "(torch.nn.utils.parametrize) whose torch.autograd.Function does so in backward: that is traced. To look at "
    "gradients, call sharded.value_and_grad."
)
ON_MODULE = (
    "A program calls no backward hooks. Remove it, and call tensor.register_hook on the input or output in forward: "
    "that is traced."
)


def backward_hooks(modules: Iterable[nn.Module]) -> list[Mapping[int, Any]]:
    """The tables of backward hooks of these modules, and the global ones. PyTorch adds and removes hooks in them."""
    own = [table for module in modules for table in (module._backward_hooks, module._backward_pre_hooks)]
    return [*own, every_module._global_backward_hooks, every_module._global_backward_pre_hooks]


def hook_on(parameter: torch.Tensor) -> str | None:
    """The name of the method that registered an autograd hook on this parameter; None if it has no hook."""
    if parameter._backward_hooks:
        return "register_hook"
    after = parameter._post_accumulate_grad_hooks if there("hooks of parameters") else None
    return "register_post_accumulate_grad_hook" if after else None


def check_hooks(model: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises ``ValueError`` if autograd would call a hook on a module of this model, or on one of its parameters."""
    for name, parameter in named:
        if (kind := hook_on(parameter)) is not None:
            raise ValueError(f"{name} has a hook ({kind}). {ON_PARAMETER}")
    check_module_hooks(model)


def check_module_hooks(model: nn.Module, inside: bool = False) -> None:
    """Raises ``ValueError`` if a module has a backward hook. ``inside``: autograd calls the model's own hooks."""
    if not any(backward_hooks(model.modules())):
        return
    for name, module in model.named_modules():
        if (module._backward_hooks or module._backward_pre_hooks) and not (inside and module is model):
            raise ValueError(f"{name or 'The model'} ({type(module).__name__}) has a backward hook. {ON_MODULE}")
    every = [*every_module._global_backward_hooks.values(), *every_module._global_backward_pre_hooks.values()]
    if not all(map(is_tracker, every)):
        raise ValueError(f"All modules have a backward hook (register_module_full_backward_hook). {ON_MODULE}")
