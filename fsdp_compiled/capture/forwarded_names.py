"""Names that an object gets of its own, which its class found elsewhere when a trace asked for them.

    wrapped = checkpoint_wrapper(block)     wrapped.scale is block.scale: `__getattr__` looks there
    wrapped.scale = 3.0                     from here on it is the wrapper's own

Dynamo walks through such a `__getattr__`, and guards what it came to, not that the object itself had no such name.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import nn


def looks_elsewhere(kind: type) -> bool:
    """Whether a class has a `__getattr__` of its own, and its objects names of theirs."""
    found = getattr(kind, "__getattr__", None)
    if not isinstance(found, types.FunctionType) or found is nn.Module.__getattr__ or not hasattr(kind, "__dict__"):
        return False
    # PyTorch's tables of operators gain names as they are used, and so do modules of Python.
    return issubclass(kind, nn.Module) or not (
        issubclass(kind, types.ModuleType) or kind.__module__.startswith("torch")
    )


class ForwardedNames:
    """Of the objects that a trace came to, and of all modules of the model of their classes: those that belong to a
    block which was not walked through are among them."""

    def __init__(self, values: Mapping[str, Any], root: nn.Module) -> None:
        found = {id(one): (name, one) for name, one in values.items() if looks_elsewhere(type(one))}
        if kinds := tuple({type(one) for _, one in found.values()}):
            inside = {f"model.{path}": one for path, one in root.named_modules() if isinstance(one, kinds)}
            found = {id(one): (name, one) for name, one in inside.items()} | found
        held = [(name, vars(one)) for name, one in found.values() if hasattr(one, "__dict__")]
        self.read = [(name, own, frozenset(own)) for name, own in held]

    def changed(self, _scope: object = None) -> str | None:
        """Which has another name now, by Dynamo's name."""
        return next((name for name, own, names in self.read if not own.keys() <= names), None)
