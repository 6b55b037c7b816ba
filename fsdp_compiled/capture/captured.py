"""The inputs of a capture, the function that is traced, and the result of a capture.

Forward may return an object with tensors inside that pytree does not open: a cache, a dataclass (`Opaque`):

    return Output(logits, cache)      the trace makes an Output with fake tensors inside
                                      each call returns a copy of it, with the call's own tensors in their places
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.capture.tensor_parallel import Layout, own_part, whole
from fsdp_compiled.ir.program import Port, Program

CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


@dataclass(frozen=True)
class Opaque:
    """``value``: the object as the trace left it. ``ports``: the ports of its tensors, by identity."""

    value: Any
    ports: Mapping[int, Port]

    def filled(self, outputs: Mapping[Port, torch.Tensor]) -> Any:
        """A copy with these tensors in it; modules inside are the same ones."""
        memo: dict[int, Any] = {key: outputs[port] for key, port in self.ports.items()}
        found = list(inside(self.value))
        memo |= {id(module): module for module in found if isinstance(module, nn.Module)}
        # Of a dict that looks attributes up among its keys, as ``__getattr__ = dict.__getitem__``, `deepcopy` cannot
        # ask whether it has a ``__deepcopy__``.
        keyed = [one for one in found if isinstance(one, dict)]
        memo |= {id(one): type(one).__new__(type(one)) for one in keyed}
        for one in keyed:
            dict.update(memo[id(one)], {key: copy.deepcopy(value, memo) for key, value in one.items()})
        return copy.deepcopy(self.value, memo)


def _is_keyed(value: Any) -> bool:
    """Whether a dict's class raises another error than AttributeError for an attribute that is not there."""
    if type(value) is dict or not isinstance(value, dict):
        return False
    try:
        hasattr(value, "__deepcopy__")
    except Exception:
        return True
    return False


def inside(value: Any) -> Iterator[Any]:
    """The tensors and modules in an object, and dicts that `_is_keyed`: in its attributes, items and entries,
    recursively."""
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
        if _is_keyed(one):
            yield one
        if isinstance(one, list | tuple | set | frozenset):
            stack += one
        elif isinstance(one, Mapping):
            stack += one.values()
        stack += getattr(one, "__dict__", {}).values()
        slots = (slot for kind in type(one).__mro__ for slot in getattr(kind, "__slots__", ()) if slot != "__dict__")
        stack += [getattr(one, slot) for slot in slots if hasattr(one, slot)]


CURE = "Return one floating-point number that depends on the parameters, such as `errors.mean()`, or (scalar, aux)."


@dataclass(frozen=True)
class Tensors:
    """The tensors that the objective is a function of, real or fake, by the model's own names.

    Tied parameters appear under each of their names with the same tensor.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)  # parameters that are not sharded


@dataclass(frozen=True)
class Capture:
    """A captured program, the tensors it closes over, and how its outputs make what the user's function returned."""

    program: Program
    constants: dict[str, torch.Tensor]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # a `Port` for each tensor that the function returned, other values as they are
    guards: Guards
    layouts: Mapping[Port, Layout] = field(default_factory=dict)  # of results that are DTensors
    asked: frozenset[str] = frozenset()  # attributes that the code reads on tensors and that are not PyTorch's
    carried: frozenset[str] = frozenset()  # buffers and constants that get a value with an autograd graph
    replaced: frozenset[str] = frozenset()  # buffers that get another tensor, and are not written in place

    @cached_property
    def written(self) -> tuple[str, ...]:
        """The names of the buffers and constants that the function updates."""
        return self._updated("buffer", "constant")

    @cached_property
    def written_constants(self) -> tuple[str, ...]:
        """The names of the constants that the function updates."""
        return self._updated("constant")

    def _updated(self, *kinds: str) -> tuple[str, ...]:
        return tuple(port.name for port in self.program.ports if port.side == "out" and port.kind in kinds)

    def rebuild(self, outputs: Mapping[Port, torch.Tensor]) -> Any:
        """The structure that the user's function returned, with these tensors in it."""
        filled = [
            outputs[leaf] if isinstance(leaf, Port) else leaf.filled(outputs) if isinstance(leaf, Opaque) else leaf
            for leaf in self.leaves
        ]
        if self.layouts:
            filled = [
                self.layouts[leaf].filled(value) if isinstance(leaf, Port) and leaf in self.layouts else value
                for leaf, value in zip(self.leaves, filled, strict=True)
            ]
        return pytree.tree_unflatten(filled, self.spec)


def batch_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a batch by their place in it, such as ``"[0]"`` and ``"['labels']"``."""
    leaves = [*pytree.tree_flatten_with_path(args)[0], *pytree.tree_flatten_with_path(dict(kwargs))[0]]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


class Objective(nn.Module):
    """Calls the user's loss on the model, as one module that Dynamo traces."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.cached: list[Any] = []  # what functions under `lru_cache` return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs) if self.loss is None else self.loss(self.model, *args, **kwargs)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Skips the global module hooks: they are for the user's modules, and this one is not the user's."""
        return self.forward(*args, **kwargs)


def is_pair(result: Any, loss: Callable[..., Any] | None) -> bool:
    """Whether what a loss function returned is ``(loss, aux)``."""
    return loss is not None and isinstance(result, tuple) and len(result) == 2


def find_loss(result: Any, loss: Callable[..., Any] | None) -> Any:
    """The loss in a returned value: the value itself, its ``.loss``, its ``["loss"]`` or the first element of
    ``(loss, aux)``; where the model returns its loss itself, the first element of any tuple or list."""
    if is_pair(result, loss):
        return result[0]
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if getattr(result, "loss", None) is not None:
        return result.loss
    return result[0] if loss is None and isinstance(result, tuple | list) and result else result


def own(value: Any) -> Any:
    """Copies of the tensors, so that no output shares memory with an input or another output."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: whole(tensor).detach().clone(), value)


def apart_from_others(value: Any) -> Any:
    """Copies without `detach`: the user's code differentiates them outside. For a DTensor, this rank's shard."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: own_part(tensor).clone(), value)


def apart(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same tensors as nodes of the trace: Dynamo traces `requires_grad_` on nodes alone, not on inputs.

    A tensor that is given twice stays one tensor, so that ``x is y`` gives the same as in eager PyTorch.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    apart: list[Any] = []
    for place, leaf in enumerate(leaves):
        first = next((other for other in range(place) if leaves[other] is leaf), None)
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.requires_grad:
            apart.append(leaf)
        else:
            apart.append(apart[first] if first is not None else leaf.detach())
    return pytree.tree_unflatten(apart, spec)
