"""A program's inputs and outputs by place: what is looked up once, so that a step is a straight line.

    inputs   shard 0 | shard 1 | batch [0] | state ...      a pair each: (who holds it, under what name)
    outputs  loss | norm | ...                              by index

Who holds an input is a dictionary of the state, bound when a state is seen for the first time, or the list of the
batch's leaves. The state's tensors are looked up again in every call, in one comprehension, so that a tensor that was
put into the state is the one that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
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
        self._sizes = [_dim(port, self._leaf) for port in ports if port.kind == "size"]
        self._now: list[int] = []
        self._bound: object = None
        self._pairs: list[tuple[Any, Any]] = []

    def inputs(self, leaves: Sequence[Any], bound: object, holders: Holders) -> list[Any]:
        """The inputs. ``holders`` gives who holds them, by kind, and is asked when ``bound`` is another object."""
        if bound is not self._bound:
            self._bound, self._pairs = bound, list(self._pair(holders()))
        self._leaves[:] = leaves
        if self._sizes:
            self._now[:] = [leaves[leaf].shape[dim] for leaf, dim in self._sizes]
        found = [holder[name] for holder, name in self._pairs]
        self._leaves.clear()
        return found

    def forget(self) -> None:
        """Who holds the inputs is asked again."""
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


def _dim(port: Port, leaf: Mapping[str, int]) -> tuple[int, int]:
    assert port.dim is not None
    return leaf[port.name], port.dim


def flatten(batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Sequence[Any], object]:
    """The leaves of a batch, and something that is equal for batches of the same structure."""
    if not named and all(type(value) is torch.Tensor for value in batch):
        return batch, len(batch)
    return pytree.tree_flatten((batch, named))


def same_tensors(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Empty where all are different objects; else, for each, the first that is the same object."""
    found = list(map(id, tensors))
    return () if len(set(found)) == len(found) else tuple(map(found.index, found))


def replaced(
    batch: tuple[Any, ...], named: dict[str, Any], others: Mapping[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with these tensors in the place of its own, by their identity."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: others[id(tensor)], (batch, named))
