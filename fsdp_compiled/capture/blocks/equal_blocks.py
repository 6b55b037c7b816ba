"""Equal stretches of a graph that Dynamo traced, such as a model's blocks, one after the other.

A *stretch* is a row of nodes. Its operators, arguments and layouts equal those of the stretch before it, moved on by
one stretch: it reads its own inputs (a block's parameters), results of the stretch before, and values that all of them
read. If blocks alternate, such as those with full and with local attention, a stretch is one round of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.closure_values import layout_of
from fsdp_compiled.capture.source_lines import path_of
from fsdp_compiled.ir.program import Port

FIRST, SECOND, THIRD, LATER = range(4)  # the stretches that are differentiated: three, and one or two at the end
FEWEST = 6  # fewer stretches are not worth it
NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


@dataclass
class Run:
    """Stretches that follow one another.

    own     for each, the inputs that it alone reads
    ends    how many at the end are differentiated. Backward begins with the last one, so nothing is added there to the
            gradient of values that all of them read. If there is such a gradient, one like the third precedes the last.
    """

    stretches: list[list[fx.Node]]
    own: list[list[Port]]
    ends: int

    @property
    def kept_ones(self) -> range:
        return range(LATER + self.ends)

    @property
    def middle(self) -> range:
        """The stretches that are like the third and are not differentiated."""
        return range(LATER, len(self.stretches) - self.ends)

    def kept(self, stretch: int) -> int | None:
        """The number of a stretch among those that are differentiated; None if it is not one of them."""
        if stretch in self.middle:
            return None
        return stretch if stretch < LATER else stretch - len(self.middle)

    def place(self, kept: int) -> int:
        """The number among all stretches of number ``kept`` among those that are differentiated."""
        return kept if kept < LATER else kept + len(self.middle)


def runs_of(module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port]) -> list[Run]:
    """The rows of equal stretches, in the order of the graph."""
    if not all(isinstance(value, torch.Tensor) for value in inputs):
        return []  # sizes that move
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op == "get_attr" and not isinstance(_attribute(module, node), fx.GraphModule) for node in nodes):
        return []  # a literal
    if len({str(port) for port in given}) < len(given):
        return []  # the same input twice
    places = _Places(module, inputs, given)
    found: list[Run] = []
    taken = 0
    for starts in _candidates(module, nodes):
        if starts[0] < taken:
            continue
        run = _longest(nodes, starts, places)
        if run is not None:
            found.append(run)
            taken = nodes.index(run.stretches[-1][-1]) + 1
    return found


def _candidates(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[list[int]]:
    """Where the blocks of one list begin, for each list that has enough of them, in the order of the graph."""
    starts: dict[str, dict[str, int]] = {}
    for place, node in enumerate(nodes):
        for path in dict.fromkeys(map(path_of, with_body(module, node))):
            for match in NUMBER.finditer(path):
                starts.setdefault(path[: match.start()], {}).setdefault(match[0], place)
    return sorted(list(one.values()) for one in starts.values() if len(one) >= FEWEST)


class _Places:
    """The inputs of a graph, which may be a stretch's own."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port]) -> None:
        storages = Counter(value.untyped_storage()._cdata for value in inputs)
        self.ports = given
        self.calls = _Kinds(module)
        self.index = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
        self.kinds = [
            (port.kind, layout_of(value), value.is_leaf, isinstance(value, nn.Parameter))
            if storages[value.untyped_storage()._cdata] == 1
            else None
            for value, port in zip(inputs, given, strict=True)
        ]


def _longest(nodes: list[fx.Node], starts: list[int], places: _Places) -> Run | None:
    """The longest row of equal stretches among those that begin here."""
    length = Counter(after - before for before, after in pairwise(starts)).most_common(1)[0][0]
    rows: list[list[int]] = [[]]
    for index, start in enumerate(starts):
        if rows[-1] and starts[rows[-1][-1]] + length != start:
            rows.append([])
        if start + length <= len(nodes):
            rows[-1].append(index)
    blocks = [[nodes[starts[index] : starts[index] + length] for index in row] for row in rows]
    found = [(stretches, *_described(stretches, places)) for stretches in blocks]
    runs = [run for stretches, keys, own in found for run in _equal(stretches, keys, own, places)]
    if not runs:  # blocks may alternate: every second one, or every sixth, may be of another kind
        for stretches, keys, _ in found:
            if (period := _period(keys)) is not None:
                longer = [list(chain(*stretches[start : start + period])) for start in range(0, len(stretches), period)]
                longer = longer[: len(stretches) // period]
                runs += _equal(longer, *_described(longer, places), places)
    return max(runs, key=lambda run: len(run.stretches), default=None)


Keys = list[tuple[Any, ...]]
Owned = dict[fx.Node, int]


def _described(stretches: list[list[fx.Node]], places: _Places) -> tuple[list[Keys], list[Owned]]:
    """For each stretch, the keys of its nodes; and for each, the inputs that it reads, in order."""
    own: list[Owned] = [{} for _ in stretches]
    return [_keys(stretches, index, own[index], places) for index in range(len(stretches))], own


def _period(keys: list[Keys]) -> int | None:
    """The number of stretches after which they repeat, if it is 2 or more; else None."""
    for period in range(2, len(keys) // FEWEST + 1):
        if all(one == other for one, other in zip(keys[1:], keys[period + 1 :], strict=False)):
            return period
    return None


def _equal(stretches: list[list[fx.Node]], keys: list[Keys], own: list[Owned], places: _Places) -> Iterator[Run]:
    """The rows of at least `FEWEST` equal ones."""
    begin = 0
    while begin < len(stretches) - 1:
        end = begin + 1  # what the first one reads need not match: other nodes come before it
        if [key[:-1] for key in keys[begin]] == [key[:-1] for key in keys[end]]:
            while end + 1 < len(stretches) and keys[end + 1] == keys[end]:
                end += 1
        if end - begin + 1 >= FEWEST:
            run = _alone(stretches[begin : end + 1], [list(one) for one in own[begin : end + 1]], places)
            if run is not None:
                yield run
        begin = end


def _keys(stretches: list[list[fx.Node]], index: int, own: Owned, places: _Places) -> Keys:
    """For each node of a stretch a key, which ends with what the node reads. Nodes of two stretches have equal keys if
    they do the same, moved on by the distance of the stretches."""
    here = {node: offset for offset, node in enumerate(stretches[index])}
    before = {node: offset for offset, node in enumerate(stretches[index - 1])} if index else {}

    def read(node: fx.Node) -> Any:
        if node in here:
            return Token(("here", here[node]))
        if node in before:
            return Token(("before", before[node]))
        if node.op == "placeholder":
            place = own.setdefault(node, len(own))
            return Token(("input", place, places.kinds[places.index[node]] or node))
        return Token(("outside", node))

    return [
        (*places.calls.of(node), *numbers((node.args, node.kwargs)), fx.node.map_arg((node.args, node.kwargs), read))
        for node in stretches[index]
    ]


def numbers(value: Any) -> Iterator[str]:
    """The texts of arguments that compare equal to others with another effect: 0.0 to -0.0, and 1 to True."""
    kind = type(value)
    if kind in (float, bool, complex):
        yield repr(value)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, dict):
        yield from numbers(tuple(value.values()))


class Token(tuple[Any, ...]):
    """Stands for a node among arguments."""


class _Kinds:
    """What nodes of a module's graph do. Nodes of written blocks have values and module stacks in common."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._layouts: dict[int, Any] = {}  # of values, by identity
        self._stacks: dict[int, tuple[Any, ...]] = {}  # the classes in module stacks, by identity

    def of(self, node: fx.Node) -> tuple[Any, ...]:
        """What the node does, without its arguments."""
        meta = node.meta
        target = self._body(node) if node.op == "get_attr" else node.target
        modules, value = meta.get("nn_module_stack", {}), meta.get("example_value")
        if (stack := self._stacks.get(id(modules))) is None:
            stack = tuple(kind for _, kind in modules.values())
            if modules:  # an empty default is not kept alive, so another object may get its identity
                self._stacks[id(modules)] = stack
        if (layout := self._layouts.get(id(value))) is None:
            layout = self._layouts[id(value)] = pytree.tree_map_only(torch.Tensor, layout_of, value)
        rest = tuple(sorted((key, str(meta[key])) for key in ("recompute", "custom") if key in meta))
        return (node.op, target, stack, rest, layout if node.op != "get_attr" else None)

    def _body(self, node: fx.Node) -> tuple[Any, ...]:
        """What the body of a checkpointed region, or of another operator that has one, does."""
        body = _attribute(self._module, node)
        kinds = _Kinds(body)
        places = {inner: place for place, inner in enumerate(body.graph.nodes)}
        lines: list[Any] = [sorted((str(key), str(value)) for key, value in body.meta.items())]
        for inner in body.graph.nodes:
            kind = kinds.of(inner) if inner.op not in ("placeholder", "output") else ()
            args = fx.node.map_arg((inner.args, inner.kwargs), lambda one: places[one])  # type: ignore[arg-type,return-value]
            lines.append((inner.op, kind, *numbers((inner.args, inner.kwargs)), args))
        return tuple(lines)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(module, str(node.target))


def _alone(stretches: list[list[fx.Node]], own: list[list[fx.Node]], places: _Places) -> Run | None:
    """The run, if only a stretch itself reads its own inputs, and only it and the next read its results; else None.
    Any node may read results of the first and the last stretch."""
    where = {node: index for index, stretch in enumerate(stretches) for node in stretch}
    for index, stretch in enumerate(stretches[1:-1], 1):
        if any(where.get(user) not in (index, index + 1) for node in stretch for user in node.users):
            return None
    mine: list[list[Port]] = [[] for _ in stretches]
    for same in zip(*own, strict=True):
        if len(set(same)) == 1:
            continue
        for index, node in enumerate(same):
            if places.kinds[places.index[node]] is None or any(where.get(user) != index for user in node.users):
                return None
            mine[index].append(places.ports[places.index[node]])
    read = chain(*(node.all_input_nodes for node in stretches[SECOND]))
    before = {node for node in read if node not in where and node not in own[SECOND]}
    before |= {node for node, *others in zip(*own, strict=True) if node in others}
    return Run(stretches, mine, 2 if any(map(_differentiated, before)) else 1)


def _differentiated(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def with_body(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """The node, and those of the body that it names."""
    yield node
    if node.op == "get_attr" and isinstance(body := _attribute(module, node), fx.GraphModule):
        for inner in body.graph.nodes:
            yield from with_body(body, inner)


def texts_of(module: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """Where the node came from, in words: its submodule and the user's lines."""
    for one in with_body(module, node):
        yield path_of(one)
        yield one.meta.get("stack_trace", "")
