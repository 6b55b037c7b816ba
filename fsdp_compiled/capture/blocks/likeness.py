"""Whether what a guard of one block looks at is, in another block, what it is in the one."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from fsdp_compiled.capture.absent_names import looks_elsewhere
from fsdp_compiled.capture.blocks.block_calls import Unlike, plain
from fsdp_compiled.capture.blocks.equal_blocks import layout_of

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
HOOKS_OF = itemgetter(*HOOKS)
TABLES = ("_modules", "_parameters", "_buffers")
TEXT = {str}


def likeness(one: Any) -> Callable[[Any], bool]:
    """`alike` of one with others."""
    kind = type(one)
    if isinstance(one, nn.Module):
        return lambda other: type(other) is kind
    if looks_elsewhere(kind):  # where, is in what it alone holds
        return lambda other: other is one
    if kind in (dict, OrderedDict) and not one:
        return lambda other: type(other) is kind and not other
    if isinstance(one, dict) and set(map(type, one)) <= TEXT:
        keys = list(one)
        values = list(map(repr, one.values())) if all(map(plain, one.values())) else None
        return lambda other: (
            type(other) is kind
            and list(other) == keys
            and set(map(type, other)) <= TEXT
            and (values is None or values == list(map(repr, other.values())))
        )
    return functools.partial(alike, one)


def alike(one: Any, other: Any) -> bool:
    """Whether a guard on the one says of the other what it says of the one."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return layout_of(one) == layout_of(other)
    if isinstance(one, nn.Module):
        return True  # what is read of it has guards of its own
    if plain(one) and plain(other):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        if len(one) != len(other) or (one and list(map(repr, one)) != list(map(repr, other))):
            return False
        # Of a dictionary whose values are numbers all may be asked; of one of objects, those that are have guards.
        return not all(map(plain, one.values())) or list(map(repr, one.values())) == list(map(repr, other.values()))
    if type(one) is functools.partial:
        said = [(part.func, vars(part), part.args, tuple(part.keywords.items())) for part in (one, other)]
        return said[0][:2] == said[1][:2] and all(map(plain, said[0][2:])) and repr(said[0][2:]) == repr(said[1][2:])
    return isinstance(one, tuple | list) and len(one) == len(other) and all(map(alike, one, other))


def structure_of(module: nn.Module) -> list[Any]:
    """Of a block: the classes of its modules, and what they hold, by name."""
    found: list[Any] = []
    _describe(module, found)
    return found


def _describe(module: nn.Module, found: list[Any]) -> None:
    held = vars(module)
    if any(HOOKS_OF(held)) or "forward" in held:
        raise Unlike("it has hooks")
    found += type(module), module.training, list(held)
    for kind in TABLES:
        found.append([(key, one is None) for key, one in held[kind].items()] if held[kind] else None)
    for inner in held["_modules"].values():
        if inner is not None:
            _describe(inner, found)
