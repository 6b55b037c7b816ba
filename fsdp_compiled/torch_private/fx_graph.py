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


def copied_node(graph: fx.Graph, node: fx.Node, change: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy in another graph, which has no node of its name, in whose arguments nodes are changed; `copy_names` is to
    follow."""
    args, kwargs = fx.node.map_arg(node.args, change), node.kwargs
    if kwargs:
        kwargs = fx.node.map_arg(kwargs, change)  # type: ignore[assignment]
    copy = fx.Node(graph, node.name, node.op, node.target, args, kwargs, node.type)  # type: ignore[arg-type]
    copy.meta.update(node.meta)
    _put(graph, copy)
    return copy


def copy_names(source: fx.Graph, copy: fx.Graph, mapping: Mapping[fx.Node, fx.Node]) -> None:
    """``mapping``: each node's copy. What is inserted into either graph from now on has the same name in both."""
    given, taken = source._graph_namespace, copy._graph_namespace
    taken._used_names = set(given._used_names)
    taken._base_count = dict(given._base_count)
    taken._obj_to_name = {node: node.name for node in mapping.values()}


def _put(graph: fx.Graph, node: fx.Node) -> None:
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
