"""``torch.fx``'s graphs, in torch 2.11 to 2.13: nodes made in half the time of ``Graph.create_node``.

That looks through all arguments, for sizes that move to warn of, which a program may hold. Relied on: a graph's names,
its table of nodes by target, its length, and its insertion point.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

from torch import fx

# ``node.all_input_nodes``, not copied: not to be held on to, nor changed.
inputs_of: Callable[[fx.Node], Collection[fx.Node]] = attrgetter("_input_nodes")


def new_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None) -> fx.Node:
    """``graph.create_node("call_function", target, args, kwargs, name)``."""
    names = graph._graph_namespace
    name = names.create_name(name or graph._target_to_str(target), None)
    node = fx.Node(graph, name, "call_function", target, args, kwargs)
    names.associate_name_with_obj(name, node)
    _put(graph, node)
    return node


# What a node is: itself, and all of it that may be changed but its place.
Row = tuple[fx.Node, Any, tuple[Any, ...], Mapping[str, Any], dict[str, Any]]
Names = tuple[set[str], dict[str, int]]


def row_of(node: fx.Node) -> Row:
    return node, node.target, node.args, node.kwargs, dict(node.meta)


def copied_node(graph: fx.Graph, row: Row, change: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy in another graph, which has no node of its name, in whose arguments nodes are changed; `give_names` is to
    follow."""
    node, target, args, kwargs, meta = row
    args = fx.node.map_arg(args, change)
    if kwargs:
        kwargs = fx.node.map_arg(kwargs, change)  # type: ignore[assignment, type-var]
    copy = fx.Node(graph, node.name, node.op, target, args, kwargs, node.type)  # type: ignore[arg-type]
    copy.meta.update(meta)
    _put(graph, copy)
    return copy


def names_of(graph: fx.Graph) -> Names:
    """The names that nodes of the graph have or had, which no other gets."""
    names = graph._graph_namespace
    return set(names._used_names), dict(names._base_count)


def give_names(graph: fx.Graph, names: Names) -> None:
    """What is inserted into this graph, a copy, has the same name as in that of which these are."""
    taken = graph._graph_namespace
    taken._used_names, taken._base_count = set(names[0]), dict(names[1])
    taken._obj_to_name = {node: node.name for node in graph.nodes}


def _put(graph: fx.Graph, node: fx.Node) -> None:
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
