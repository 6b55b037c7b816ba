"""A program's inputs and outputs by place. They are looked up once, so that a step runs straight through.

    inputs   shard 0 | shard 1 | batch [0] | state ...      each held by somebody, under a name
    outputs  loss | norm | ...                              by index

An input comes from a dictionary of the state, which is bound when a state is first seen, or from the list of the
batch's leaves. Each call looks the state's tensors up again, so that it uses a tensor that was put into the state
meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.program import Port

Holders = Callable[[], Mapping[str, Mapping[str, Any]]]


class InputBinding:
    """Gathers the inputs of one program, in its order."""

    def __init__(self, ports: Sequence[Port], batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        places = [pytree.keystr(path) for part in (batch, named) for path, _ in pytree.tree_flatten_with_path(part)[0]]
        self._ports = ports
        self._leaf = {place: index for index, place in enumerate(places)}
        self._leaves: list[Any] = []
        self._sizes = [(self._leaf[port.name], port.dim or 0) for port in ports if port.kind == "size"]
        self._now: list[int] = []
        self._bound: object = None
        self._pairs: list[tuple[Any, Any]] = []  # for each input, what holds it, and under which name

    def inputs(self, leaves: Sequence[Any], bound: object, holders: Holders) -> Sequence[Any]:
        """The inputs. ``holders`` returns the dictionaries by kind; it is called when ``bound`` is another object than
        before."""
        if bound is not self._bound:
            self._bound = bound
            self._pairs = list(self._pair(holders()))
        self._leaves[:] = leaves
        if self._sizes:
            self._now[:] = [leaves[leaf].shape[dim] for leaf, dim in self._sizes]
        found = [holder[name] for holder, name in self._pairs]
        self._leaves.clear()
        return found

    def forget(self) -> None:
        """Forgets the dictionaries, so that the next call asks for them again."""
        self._bound = None

    def _pair(self, holders: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[Any, Any]]:
        sizes = iter(range(len(self._sizes)))
        for port in self._ports:
            if port.kind == "batch":
                yield self._leaves, self._leaf[port.name]
            elif port.kind == "size":
                yield self._now, next(sizes)
            else:
                yield holders[port.kind], port.key


def flatten(batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Sequence[Any], object]:
    """The leaves of a batch, and a value that is equal for batches of the same structure."""
    if not named and {*map(type, batch)} == {torch.Tensor}:
        return batch, len(batch)
    return pytree.tree_flatten((batch, named))


def same_tensors(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Empty if all are different objects. Otherwise, for each tensor, the first one that is the same object."""
    found = list(map(id, tensors))
    return () if len(set(found)) == len(found) else tuple(map(found.index, found))


def replaced(
    batch: tuple[Any, ...], named: dict[str, Any], others: Mapping[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with these tensors instead of its own, matched by identity."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: others[id(tensor)], (batch, named))


def check_arguments(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    batch: tuple[Any, ...],
    named: Mapping[str, Any],
    method: str = "forward",
) -> None:
    """Raises ``ValueError`` that says what is expected and what was given. ``method``: the called method's name.

    A model with hooks that may change its arguments is not checked, nor is a function without a signature.
    """
    called: Any = model if loss is None else loss
    name = f"{type(model).__name__}.{method}" if loss is None else f"the loss, {getattr(loss, '__name__', 'loss')}"
    if isinstance(called, nn.Module):
        if called._forward_pre_hooks and method == "forward":
            return
        called = getattr(called, method)
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*(() if loss is None else (model,)), *batch, **named)
    except TypeError as error:
        plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        takes = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        given = [*["model"] * (loss is not None), *map(_text, batch), *(f"{key}={_text(named[key])}" for key in named)]
        raise ValueError(
            f"{name} does not take this batch: {error}.\n  Expected: {takes}\n  Got:      ({', '.join(given)})\n"
            "  Pass to the call what the function takes, in its order or by name."
        ) from None


def _text(value: Any) -> str:
    """``float32[4, 8]`` for a tensor, also inside a structure."""

    def one(leaf: Any) -> Any:
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

    return str(pytree.tree_map(one, value)).replace("'", "")
