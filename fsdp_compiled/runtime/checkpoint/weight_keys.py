"""Which parameter or buffer each key of a model's ``state_dict()`` is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.managed_model import holding


@dataclass(frozen=True)
class Keys:
    """By key of ``model.state_dict()``, which parameter it is, by first name, or which buffer."""

    parameters: dict[str, str]
    buffers: dict[str, str]


def keys_of(model: nn.Module, trained: Trained) -> Keys:
    """Raises ``ValueError`` for a state_dict whose values are not the model's own tensors."""
    instead: dict[int, torch.Tensor] = {}
    named: dict[int, tuple[bool, str]] = {}
    for old in model.parameters():
        new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="meta"), old.requires_grad)
        instead[id(old)] = new
        named[id(new)] = (True, old._sharded_name)
    named |= {id(buffer): (False, name) for name, buffer in trained.state.buffers.items()}
    found = Keys({}, {})
    with holding(model, instead):
        for key, value in model.state_dict(keep_vars=True).items():
            if id(value) not in named:
                raise ValueError(
                    f"{key} of the model's state_dict() is none of its parameters and buffers: a hook makes it, or it "
                    "is extra state. Use sharded.full_state_dict()."
                )
            is_parameter, name = named[id(value)]
            (found.parameters if is_parameter else found.buffers)[key] = name
    if hasattr(model, "config"):  # whose library writes tied weights once, and ties them when it loads
        first = {name: key for key, name in reversed(found.parameters.items())}
        found = Keys({key: name for name, key in reversed(first.items())}, found.buffers)
    return found


def renamed(model: Any, there: Collection[str], keys: Keys) -> Callable[[str], str]:
    """How a key of the model is called there: a head's file loads into its bare model, and the other way round."""
    base = getattr(model, "base_model_prefix", "")
    if not base or any(key in there for key in keys.parameters):
        return lambda key: key
    if any(f"{base}.{key}" in there for key in keys.parameters):
        return lambda key: f"{base}.{key}"
    return lambda key: key.removeprefix(f"{base}.")
