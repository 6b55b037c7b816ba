"""A new `nn.ModuleList` of many modules, as ``self.layers[:depth]`` makes one, is filled as a dictionary is.

Dynamo walks through `nn.ModuleList.extend`, which registers one module after the other, and asks the same six questions
of each. Here it walks for the first module; the others are put beside that one. Nobody hears of it: a list of this very
class, which the trace made, has no other attributes that their numbers could be the names of, and where registration
has hooks, the walk is for all of them. Since torch 2.14 Dynamo comes to ``+=`` another way, and walks for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

from fsdp_compiled.torch_private.dynamo import (
    AttributeMutationNew,
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    ListVariable,
    UnspecializedNNModuleVariable,
    ValueMutationNew,
)

METHODS = {name: vars(nn.ModuleList)[name] for name in ("__iadd__", "__len__", "extend")}
ADD = nn.Module.add_module


def extended(call: Any, variable: Any, tx: Any, name: str, args: Sequence[Any], fewest: int) -> Any:
    """What ``variable += args[0]`` is, if nothing but a new list is filled by it; else None.

    ``call``: Dynamo's own ``call_method``. Of less than ``fewest`` modules the walk is short.
    """
    if name != "__iadd__" or not _is_new(variable) or len(args) != 1:
        return None
    if every_module._global_module_registration_hooks or not _is_pytorchs():
        return None
    modules = _items(args[0])
    if len(modules) < fewest or not all(map(_is_module, modules)):
        return None
    inside = variable.var_getattr(tx, "_modules")
    if not isinstance(inside, ConstDictVariable) or inside.items:
        return None
    first = ListVariable(modules[:1], mutation_type=ValueMutationNew())
    made = call(variable, tx, name, [first], {})
    rest = {ConstantVariable.create(str(place)): one for place, one in enumerate(modules) if place}
    added = ConstDictVariable(rest, mutation_type=ValueMutationNew())
    variable.var_getattr(tx, "_modules").call_method(tx, "update", [added], {})
    return made


def _is_new(variable: Any) -> bool:
    return variable.value_type is nn.ModuleList and isinstance(variable.mutation_type, AttributeMutationNew)


def _is_pytorchs() -> bool:
    own = all(vars(nn.ModuleList).get(name) is method for name, method in METHODS.items())
    return own and nn.ModuleList.add_module is ADD


def _items(variable: Any) -> list[Any]:
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    return variable.items if type(variable) is ListVariable else []


def _is_module(variable: Any) -> bool:
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return isinstance(variable.original_value(), nn.Module)
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    return isinstance(variable, UnspecializedNNModuleVariable)
