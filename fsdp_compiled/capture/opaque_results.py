"""Objects that forward returns and pytree does not open, with tensors inside: caches, dataclasses.

return Output(logits, cache)      a trace leaves an Output with tensors without numbers inside
                                  each call gives a copy of it, with its own tensors in their places
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compiled.ir.program import Port

CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


@dataclass(frozen=True)
class Opaque:
    """``value``: the object as the trace left it. ``ports``: what its tensors are, by identity."""

    value: Any
    ports: Mapping[int, Port]

    def filled(self, outputs: Mapping[Port, torch.Tensor]) -> Any:
        """A copy with these tensors in it; modules inside are the same ones."""
        memo: dict[int, Any] = {key: outputs[port] for key, port in self.ports.items()}
        memo |= {id(module): module for module in inside(self.value) if isinstance(module, nn.Module)}
        return copy.deepcopy(self.value, memo)


def inside(value: Any) -> Iterator[torch.Tensor | nn.Module]:
    """The tensors and modules in an object: in its attributes, items and entries, and theirs."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, CLOSED):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor | nn.Module):
            yield one
            continue
        if isinstance(one, list | tuple | set | frozenset):
            stack += one
        elif isinstance(one, Mapping):
            stack += one.values()
        stack += getattr(one, "__dict__", {}).values()
        slots = (slot for kind in type(one).__mro__ for slot in getattr(kind, "__slots__", ()) if slot != "__dict__")
        stack += [getattr(one, slot) for slot in slots if hasattr(one, slot)]
