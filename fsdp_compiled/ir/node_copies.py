"""Copies of the nodes of ``torch.fx`` graphs, in the same graph and in others.

A *row* holds all of a node that may be changed, except its place. Entries of ``node.meta`` are shared, not copied: a
pass writes entries for nodes that it makes, and new ones for an existing node that it changes.

`Kept` remembers a program whose graph is given away, as it was, for a quarter of the cost of a copy:

    kept = Kept(program)        the rows of its nodes: operator, arguments, and what is noted of it
    ...                         passes change the graph itself
    kept.program()              a graph of these rows, where somebody looks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from fsdp_compiled.ir.program import Program
from fsdp_compiled.torch_private.names import there

map_arg = fx.node.map_arg
Row = tuple[fx.Node, Any, tuple[Any, ...], Mapping[str, Any], dict[str, Any]]
Names = tuple[set[str], dict[str, int]]
# The call to repeat, its operator and arguments, and the name for the new call.
Like = tuple[fx.Node, Any, tuple[Any, ...], dict[str, Any], str]


def row_of(node: fx.Node) -> Row:
    return node, node.target, node.args, node.kwargs, node.meta


def new_node(
    graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str | None
) -> fx.Node:
    """As `fx.Graph.create_node`, which takes twice as long, since it searches the arguments for symbolic numbers."""
    node = graph.create_node(op, target, name=name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = kwargs  # type: ignore[assignment]
    return node


def new_calls(graph: fx.Graph, rows: Iterable[Like], mapping: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Makes each call in order, its argument nodes replaced as ``mapping`` says, and adds it to ``mapping``."""
    change, found = mapping.__getitem__, []
    for first, target, args, kwargs, stem in rows:
        given: Any = map_arg(args, change)
        named: Any = map_arg(kwargs, change) if kwargs else {}
        mapping[first] = node = new_node(graph, "call_function", target, given, named, stem)
        found.append(node)
    return found


def copied_node(graph: fx.Graph, row: Row, change: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy in another graph with its argument nodes changed; that graph has no node of its name."""
    node, target, args, kwargs, meta = row
    given: Any = map_arg(args, change)
    named: Any = map_arg(kwargs, change) if kwargs else {}
    copy = new_node(graph, node.op, target, given, named, node.name)
    copy.meta.update(meta)
    return copy


def input_for(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A placeholder in another graph for what the node computes; that graph has no node of its name."""
    made = graph.create_node("placeholder", node.name, (), {}, node.name)
    made.meta.update(node.meta)
    return made


def names_of(graph: fx.Graph) -> Names:
    """The names that nodes of the graph have or had, and that no other node gets."""
    if not there("nodes' names"):
        return set(), {}
    names = graph._graph_namespace
    return set(names._used_names), dict(names._base_count)


def give_names(graph: fx.Graph, names: Names) -> None:
    """Gives this graph, a copy, the original's names: later nodes are named as they would be in the original."""
    if not there("nodes' names"):
        return
    taken = graph._graph_namespace
    taken._used_names, taken._base_count = set(names[0]), dict(names[1])


class Kept:
    """What it takes to make a program again."""

    def __init__(self, program: Program) -> None:
        self._rest = replace(program, graph=fx.Graph(), donated=False)
        self._rows = [row_of(node) for node in program.graph.nodes]
        self._names = names_of(program.graph)

    def program(self) -> Program:
        """The original program, with the same nodes and names, in a new graph."""
        return replace(self._rest, graph=copied(self._rows, self._names, {}))


def copied(rows: Iterable[Row], names: Names, mapping: dict[fx.Node, fx.Node]) -> fx.Graph:
    """A new graph with these nodes; ``mapping`` is filled with each one's copy.

    Nodes inserted later have the same names in the copy as in the original.
    """
    graph = fx.Graph()
    for row in rows:
        mapping[row[0]] = copied_node(graph, row, mapping.__getitem__)
    give_names(graph, names)
    return graph
