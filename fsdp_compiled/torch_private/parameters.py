"""What ``nn.Parameter``, ``swap_tensors`` and a parameter's hooks are made of, in torch 2.11 to 2.13, each in one call.

Relied on: that a parameter is a tensor of its class that shares memory with another; that two tensors of Python may
exchange what they stand for, if nobody in C++ holds either; and the attribute that holds a parameter's hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp_compiled.torch_private.core import C

P = TypeVar("P", bound=nn.Parameter)
make_subclass = torch.Tensor._make_subclass  # a tensor of a class, on the memory of another


def parameter_of(kind: type[P], data: torch.Tensor, requires_grad: bool) -> P:
    """``kind(data, requires_grad)``, of a plain tensor."""
    return make_subclass(kind, data, requires_grad)  # type: ignore[no-any-return]


def swap_plain(parameter: nn.Parameter, made: torch.Tensor) -> bool:
    """Makes a parameter what ``made`` is, which is used up, but for its attributes: whether that was possible.

    It is for a plain parameter that nothing but Python holds; `torch.utils.swap_tensors` knows others, or refuses.
    """
    if type(parameter) is not nn.Parameter or parameter._use_count() != 1 or weakref.getweakrefcount(parameter):
        return False
    kind = type(made)
    C._swap_tensor_impl(parameter, made)
    parameter.__class__ = kind  # type: ignore[assignment]
    return True


def add_hooks(parameter: torch.Tensor, hooks: Mapping[int, Callable[[torch.Tensor], None]]) -> None:
    """Has autograd call these when it has added to the parameter's gradient. Many parameters may have one table.

    `register_post_accumulate_grad_hook` makes a table for each, and takes none that needs no gradient yet.
    """
    own: Any = parameter
    own._post_accumulate_grad_hooks = hooks
