"""Calls that were inserted for one unit, inserted again for another that is like it.

    made for layers.0                                again for layers.1

    layers_0_view = split(shard_layers_0, [8, 4])    layers_1_view = split(shard_layers_1, [8, 4])
    layers_0_view_1 = getitem(layers_0_view, 0)      layers_1_view_1 = getitem(layers_1_view, 0)

Each call has the operator, the arguments, the role and the fake tensors of the first one's: nothing is worked out. What
that read of the given nodes, and of the calls before it, is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.nodes import Mark, Phase
from fsdp_compiled.torch_private.fx_graph import new_call


@dataclass(frozen=True)
class Of:
    """Whose calls they are."""

    unit: str
    buffers: tuple[str, ...]


class Made:
    """The calls of one unit, in order. ``given``: nodes that they read; ``found``: those of them that are wanted."""

    def __init__(self, calls: Sequence[fx.Node], given: Sequence[fx.Node], found: Sequence[fx.Node], of: Of) -> None:
        self._given, self._found, self._of = given, found, of
        own = {id(node.meta["val"]): place for place, node in enumerate(given)}
        # With the place of the given node whose tensor is the result: an operator returns what it writes in place.
        self._calls = [
            (node, node.target, node.args, node.kwargs, node.meta["mark"], value, own.get(id(value)))
            for node in calls
            for value in (node.meta["val"],)
        ]
        whose = all(mark.unit == of.unit and mark.buffer in (*of.buffers, "") for *_, mark, _, _ in self._calls)
        several = [value for *_, value, place in self._calls if place is None and isinstance(value, tuple | list)]
        self.repeats = whose and not any(id(value) in own for value in pytree.tree_leaves(several))

    def again(
        self, graph: fx.Graph, given: Sequence[fx.Node], of: Of, phase: Phase, name_of: Callable[[Mark], str]
    ) -> list[fx.Node]:
        """The same of these nodes, for this unit, at the graph's point of insertion."""
        mapping = _Mapping(zip(self._given, given, strict=True))
        keys = dict(zip(self._of.buffers, of.buffers, strict=True)) | {"": ""}
        marks: dict[int, tuple[Mark, str]] = {}
        for first, target, args, kwargs, old, value, place in self._calls:
            if (known := marks.get(id(old))) is None:
                mark = replace(old, unit=of.unit, buffer=keys[old.buffer])
                known = marks[id(old)] = mark, name_of(mark)
            args = fx.node.map_arg(args, mapping.__getitem__)  # type: ignore[assignment]
            kwargs = fx.node.map_arg(kwargs, mapping.__getitem__) if kwargs else kwargs  # type: ignore[assignment]
            node = mapping[first] = new_call(graph, target, args, kwargs, known[1])
            meta = node.meta
            meta["phase"], meta["mark"] = phase, known[0]
            meta["val"] = value if place is None else given[place].meta["val"]
        return [mapping[node] for node in self._found]


class _Mapping(dict[fx.Node, fx.Node]):
    """What is no unit's own is itself."""

    def __missing__(self, node: fx.Node) -> fx.Node:
        return node
