"""Inserts the calls that a pass made for one unit again for another that is like it.

    made for layers.0                                again for layers.1

    layers_0_view = split(shard_layers_0, [8, 4])    layers_1_view = split(shard_layers_1, [8, 4])
    layers_0_view_1 = getitem(layers_0_view, 0)      layers_1_view_1 = getitem(layers_1_view, 0)

Each call has the operator, the arguments, the role and the fake tensors of the first one's: nothing is worked out. What
that read of the given nodes, and of the calls before it, is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.node_copies import new_calls
from fsdp_compiled.ir.nodes import Mark, Phase


@dataclass(frozen=True)
class Scope:
    """Whose calls they are."""

    unit: str
    buffers: tuple[str, ...]


class Insertion:
    """The calls of one unit, in order. ``given``: nodes that they read; ``found``: those of them that are wanted."""

    def __init__(self, calls: Sequence[fx.Node], given: Sequence[fx.Node], found: Sequence[fx.Node], of: Scope) -> None:
        self._given, self._found, self._of = given, found, of
        own = {id(node.meta["val"]): place for place, node in enumerate(given)}
        # With the place of the given node whose tensor is the result: an operator returns what it writes in place.
        self._marks: list[Mark] = list(dict.fromkeys(node.meta["mark"] for node in calls))
        numbers = {mark: number for number, mark in enumerate(self._marks)}
        self._calls = [
            (node, node.target, node.args, node.kwargs, numbers[node.meta["mark"]], value, own.get(id(value)))
            for node in calls
            for value in (node.meta["val"],)
        ]
        whose = all(mark.unit == of.unit and mark.buffer in (*of.buffers, "") for mark in self._marks)
        several = [value for *_, value, place in self._calls if place is None and isinstance(value, tuple | list)]
        self.repeats = whose and not any(id(value) in own for value in pytree.tree_leaves(several))

    def again(
        self, graph: fx.Graph, given: Sequence[fx.Node], of: Scope, phase: Phase, name_of: Callable[[Mark], str]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """The same of these nodes, for this unit, at the graph's point of insertion; and what was found there."""
        mapping = _Mapping(zip(self._given, given, strict=True))
        keys = dict(zip(self._of.buffers, of.buffers, strict=True)) | {"": ""}
        marks = [Mark(mark.role, of.unit, keys[mark.buffer], mark.purpose) for mark in self._marks]
        names = [name_of(mark) for mark in marks]
        rows = [(first, target, args, kwargs, names[one]) for first, target, args, kwargs, one, _, _ in self._calls]
        made = new_calls(graph, rows, mapping)
        for node, (*_, number, value, place) in zip(made, self._calls, strict=True):
            meta = node.meta
            meta["phase"], meta["mark"] = phase, marks[number]
            meta["val"] = value if place is None else given[place].meta["val"]
        return made, [mapping[node] for node in self._found]


class _Mapping(dict[fx.Node, fx.Node]):
    """What is no unit's own is itself."""

    def __missing__(self, node: fx.Node) -> fx.Node:
        return node
