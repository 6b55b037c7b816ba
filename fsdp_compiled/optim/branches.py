"""Two ways that an optimizer's code may go become one graph, and the way is chosen on the device.

    if k < warmup: sched = (k + 1) / warmup             way = lt(k, 100)
    else: sched = 1.0                                   sched = where(way, (k + 1) / 100, 1.0)
    p.add_(grad, alpha=-lr * sched)                     add_(p, grad, -lr * sched)

    if step == 1: exp_avg_sq.addcmul_(grad, grad)       way = eq(step, 1); p2, v2 = clone(p), clone(exp_avg_sq)
    else: p.addcdiv_(grad, exp_avg_sq.sqrt())           exp_avg_sq.addcmul_(grad, grad)
                                                        p2.addcdiv_(grad, v2.sqrt())
                                                        p.copy_(where(way, p, p2)); exp_avg_sq.copy_(where(...))

Where both ways do the same to tensors with other numbers, only the numbers are chosen, as above; where not, both are
computed and the results are chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.nodes import mutated
from fsdp_compiled.optim.twin import Untraceable

aten = torch.ops.aten
ALIASES = (aten.detach.default, aten.alias.default)


def resolve_aliases(graph: fx.Graph) -> None:
    """Every value is read by the name of the tensor that holds it: views of the whole, and results of writes, go."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ALIASES or (node.target in (aten.view.default, aten.view_as.default) and _same_shape(node)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif (targets := mutated(node)) and node.users and isinstance(node.meta.get("val"), torch.Tensor):
            node.replace_all_uses_with(targets[0])


def merge(yes: fx.Graph, no: fx.Graph, place: int) -> fx.Graph:
    """One graph of two that are alike up to their branch ``place``.

    The outputs of each are the predicates of its branches, in order; of the result, those before ``place``.
    """
    merged = _Merge(yes, no, place)
    return merged.graph


class _Merge:
    def __init__(self, yes: fx.Graph, no: fx.Graph, place: int) -> None:
        self.graph = fx.Graph()
        self.maps: tuple[dict[fx.Node, Any], dict[fx.Node, Any]] = ({}, {})
        self._made: dict[Any, fx.Node] = {}
        predicates = _predicates(yes)
        rows = [_before_and_after(graph, _predicates(graph)[place]) for graph in (yes, no)]
        if [_text(node) for node in rows[0][0]] != [_text(node) for node in rows[1][0]]:
            raise Untraceable("its step does not do the same when it is traced twice")
        for one, other in zip(rows[0][0], rows[1][0], strict=True):
            self.maps[0][one] = self.maps[1][other] = self._copy(one, self.maps[0])
        self.way = self.maps[0][predicates[place]]
        if self.way.meta["val"].dim():
            raise Untraceable("its Python code branches on a value that is not one number")
        after = (rows[0][1], rows[1][1])
        if _alike(*after, self.maps):
            self._choose_numbers(*after)
        else:
            self._choose_results(*after)
        self.graph.output(tuple(self.maps[0][node] for node in predicates[:place]))

    def _copy(self, node: fx.Node, mapping: dict[fx.Node, Any]) -> fx.Node:
        new = self.graph.node_copy(node, mapping.__getitem__)
        mapping[node] = new
        return new

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = next(arg for arg in args[::-1] if isinstance(arg, fx.Node)).meta["val"]
        return node

    def _select(self, one: Any, other: Any) -> Any:
        if one is other or (not isinstance(one, fx.Node) and one == other):
            return one
        key = ("where", one, other)
        if key not in self._made:
            made = self._call(aten.where.self, self.way, one, other)
            made.meta["val"] = one.meta["val"]
            self._made[key] = made
        return self._made[key]

    def _choose_numbers(self, yes: list[fx.Node], no: list[fx.Node]) -> None:
        """The tensors' operators once, with numbers that are chosen."""
        rows = (iter(yes), iter(no))
        while True:
            one = self._numbers_until_tensors(rows[0], self.maps[0])
            other = self._numbers_until_tensors(rows[1], self.maps[1])
            if one is None or other is None:
                return
            args = [
                fx.node.map_arg((node.args, node.kwargs), mapping.__getitem__)
                for node, mapping in zip((one, other), self.maps, strict=True)
            ]
            mixed = _zip_map(self._select, *args)
            node = self.graph.call_function(one.target, *mixed)
            node.meta = dict(one.meta)
            self.maps[0][one] = self.maps[1][other] = node
            self._made.clear()  # what it wrote may be read again

    def _numbers_until_tensors(self, row: Any, mapping: dict[fx.Node, Any]) -> fx.Node | None:
        for node in row:
            if not is_pure_number(node):
                return node  # type: ignore[no-any-return]
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), mapping.__getitem__)
            key = (node.target, repr(args), repr(kwargs))
            if key not in self._made:
                self._made[key] = self._copy(node, mapping)
            mapping[node] = self._made[key]
        return None

    def _choose_results(self, yes: list[fx.Node], no: list[fx.Node]) -> None:
        """Both ways, one of them on copies of what either writes."""
        shared = [set(mapping) for mapping in self.maps]
        targets: dict[fx.Node, None] = {}
        for row, known, mapping in zip((yes, no), shared, self.maps, strict=True):
            for node in row:
                targets |= dict.fromkeys(mapping[target] for target in mutated(node) if target in known)
        copies = {target: self._call(aten.clone.default, target) for target in targets}
        other = {node: copies.get(mapped, mapped) for node, mapped in self.maps[1].items()}
        for node in yes:
            self._copy(node, self.maps[0])
        for node in no:
            self._copy(node, other)
        for target, copy in copies.items():
            if target.op == "placeholder":
                self._call(aten.copy_.default, target, self._call(aten.where.self, self.way, target, copy))


def _predicates(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _before_and_after(graph: fx.Graph, predicate: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    nodes = [node for node in graph.nodes if node.op != "output"]
    place = nodes.index(predicate) + 1 if predicate.op != "placeholder" else 0
    first = max(place, sum(node.op == "placeholder" for node in nodes))
    return nodes[:first], nodes[first:]


def is_pure_number(node: fx.Node) -> bool:
    """Whether the node makes one number of others, and writes nothing."""
    value = node.meta.get("val")
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 0
        and not mutated(node)
        and all(isinstance(source, torch.Tensor) and source.dim() == 0 for source in sources)
    )


def _alike(yes: list[fx.Node], no: list[fx.Node], maps: tuple[dict[fx.Node, Any], dict[fx.Node, Any]]) -> bool:
    """Whether both do the same to tensors, but for numbers that are nodes in both."""
    rows = [[node for node in row if not is_pure_number(node)] for row in (yes, no)]
    if len(rows[0]) != len(rows[1]):
        return False
    numbers = [{node for node in row if is_pure_number(node)} for row in (yes, no)]
    places = [{node: place for place, node in enumerate(row)} for row in rows]

    def name(value: Any, side: int) -> Any:
        if not isinstance(value, fx.Node):
            return repr(value)
        number = value in numbers[side] or (value in maps[side] and is_number(value))
        if number:
            return "number"
        return places[side][value] if value in places[side] else ("shared", maps[side][value].name)

    for one, other in zip(*rows, strict=True):
        texts = [
            repr(fx.node.map_aggregate((node.args, node.kwargs), lambda value, side=side: name(value, side)))
            for side, node in enumerate((one, other))
        ]
        wrote = [[name(t, side) if t not in numbers[side] else None for t in mutated(node)]
                 for side, node in enumerate((one, other))]  # fmt: skip
        if one.target != other.target or texts[0] != texts[1] or wrote[0] != wrote[1]:
            return False
        # A number that is written must be the same one.
        targets = [[maps[side].get(t) for t in mutated(node)] for side, node in enumerate((one, other))]
        if any(is_number(t) for t in mutated(one)) and (targets[0] != targets[1] or None in targets[0]):
            return False
    return True


def is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _zip_map(function: Any, one: Any, other: Any) -> Any:
    if isinstance(one, (tuple, list)):
        return type(one)(_zip_map(function, a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return {key: _zip_map(function, value, other[key]) for key, value in one.items()}
    return function(one, other)


def _text(node: fx.Node) -> str:
    return f"{node.op} {node.target} {node.args} {node.kwargs}"


def _same_shape(node: fx.Node) -> bool:
    return node.meta["val"].shape == node.args[0].meta["val"].shape  # type: ignore[union-attr]
