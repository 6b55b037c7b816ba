"""``torch.fx``'s graphs, in torch 2.11 to 2.13: nodes made in half the time of ``Graph.create_node``.

That looks through all arguments, for sizes that move to warn of, which a program may hold. Relied on: a graph's names,
its table of nodes by target, its length, and its insertion point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, lru_cache
from operator import attrgetter, getitem
from typing import Any

from torch import fx

# ``fx.node.map_arg``, in C where there is one.
map_arg: Callable[[Any, Callable[[fx.Node], Any]], Any] = getattr(fx.node, "_fx_map_arg", fx.node.map_arg)
# ``node.all_input_nodes``, not copied: not to be held on to, nor changed.
inputs_of: Callable[[fx.Node], Collection[fx.Node]] = attrgetter("_input_nodes")
# ``node.args`` and ``node.kwargs``, without a function of Python between.
ARGS: Callable[[fx.Node], tuple[Any, ...]] = attrgetter("_args")
KWARGS: Callable[[fx.Node], Mapping[str, Any]] = attrgetter("_kwargs")


def new_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None) -> fx.Node:
    """``graph.create_node("call_function", target, args, kwargs, name)``."""
    return _new(graph, "call_function", target, args, kwargs, name or graph._target_to_str(target))


# The call that one is like, its operator and arguments, and the name that it would have.
Like = tuple[fx.Node, Any, tuple[Any, ...], dict[str, Any], str]


def new_calls(graph: fx.Graph, rows: Iterable[Like], mapping: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """`new_call` for each, in order, of what ``mapping`` has for the nodes among its arguments, which it joins."""
    names, insert = graph._graph_namespace, graph._insert
    tables, named = graph._find_nodes_lookup_table.table, names._obj_to_name
    known: dict[int, Any] = {}  # of operators, by identity: their hashes are worked out in Python
    change, begin, found = mapping.__getitem__, _beginning(), []
    for first, target, args, kwargs, stem in rows:
        name = _free(names, stem) if _is_stem(stem) else _numbered(names, stem)
        args = map_arg(args, change)
        if kwargs:
            kwargs = map_arg(kwargs, change)
        if begin is None:
            node = fx.Node(graph, name, "call_function", target, args, kwargs)
        else:
            node = fx.Node.__new__(fx.Node)
            begin(node, graph, name, "call_function", target, None)
            node._update_args_kwargs(args, kwargs)
        mapping[first] = node
        named[node] = name
        found.append(node)
        insert(node)
        if (table := known.get(id(target))) is None:
            table = known[id(target)] = tables["call_function", target]
        table[node] = None
    graph._len += len(found)
    return found


def erase_unread(graph: fx.Graph, places: Iterable[fx.Node]) -> None:
    """``graph.erase_node`` for each of these placeholders, which nothing reads."""
    table = graph._find_nodes_lookup_table
    for node in places:
        if node.users:
            raise ValueError(f"{node} is read by {list(node.users)}.")
        table.remove(node)
        node._remove_from_list()
        object.__setattr__(node, "_erased", True)  # `Node.__setattr__` looks the node up
        graph._len -= 1


def read_instead(node: fx.Node, other: fx.Node) -> None:
    """``node.replace_all_uses_with(other)``."""
    for user in list(node.users):
        user._replace_input_with(node, other)


@cache
def _beginning() -> Callable[..., None] | None:
    """What ``fx.Node(...)`` does first, once it knows that it was given an operator; None where it does something else
    than to set the arguments then."""
    graph, begin = fx.Graph(), getattr(fx.Node.__base__, "__init__", None)
    args, kwargs = (fx.Node(graph, "x", "placeholder", "x", (), {}), [1]), {"alpha": 2}
    one, other = fx.Node(graph, "y", "call_function", getitem, args, kwargs), fx.Node.__new__(fx.Node)
    try:
        begin(other, graph, "y", "call_function", getitem, None)  # type: ignore[misc]
        other._update_args_kwargs(args, kwargs)
        states = [
            {key: value for key, value in node.__getstate__().items() if key not in LINKS} for node in (one, other)
        ]
    except (AttributeError, TypeError):
        return None
    return begin if states[0] == states[1] else None


LINKS = ("_prev", "_next")  # a node's own, until it is put into a graph


def new_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """``graph.placeholder(name)``."""
    return _new(graph, "placeholder", name, (), {}, name)


def _new(graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> fx.Node:
    names = graph._graph_namespace
    name = _free(names, name) if _is_stem(name) else _numbered(names, name)
    node = fx.Node(graph, name, op, target, args, kwargs)
    names._obj_to_name[node] = name
    _put(graph, node)
    return node


def _free(names: Any, stem: str) -> str:
    """``names.create_name(stem, None)``."""
    used, number, name = names._used_names, names._base_count.get(stem, 0), stem
    while name in used:
        number += 1
        name = f"{stem}_{number}"
    used.add(name)
    names._base_count[stem] = number
    return name


def _numbered(names: Any, name: str) -> str:
    """The same of another name: most are those of inputs, which nobody else has."""
    stem, _, number = name.rpartition("_")
    if not number.isdecimal() or not name.isidentifier() or name in names._used_names:
        return names.create_name(name, None)  # type: ignore[no-any-return]
    names._used_names.add(name)
    names._base_count[stem] = int(number)
    return name


@lru_cache(1 << 14)
def _is_stem(name: str) -> bool:
    """Whether a name has no number at its end, and is none of Python's."""
    return fx.Graph()._graph_namespace.create_name(name, None) == name and re.search(r"_\d+$", name) is None


# What a node is: itself, and all of it that may be changed but its place. What is noted of it is not copied: a pass
# notes things of nodes that it makes, and gives another one that it changes new notes.
Row = tuple[fx.Node, Any, tuple[Any, ...], Mapping[str, Any], dict[str, Any]]
Names = tuple[set[str], dict[str, int]]


def row_of(node: fx.Node) -> Row:
    return node, node.target, node._args, node._kwargs, node.meta


def copied_node(graph: fx.Graph, row: Row, change: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy in another graph, which has no node of its name, in whose arguments nodes are changed; `give_names` is to
    follow."""
    node, target, args, kwargs, meta = row
    args = map_arg(args, change)
    if kwargs:
        kwargs = map_arg(kwargs, change)
    copy = fx.Node(graph, node.name, node.op, target, args, kwargs, node.type)  # type: ignore[arg-type]
    copy.meta.update(meta)
    _put(graph, copy)
    return copy


def calls_by_operator(graph: fx.Graph) -> list[list[fx.Node]]:
    """The calls of each operator that the graph calls."""
    table = graph._find_nodes_lookup_table.table
    return [[*nodes] for (op, _), nodes in table.items() if op == "call_function" and nodes]


def call_instead(graph: fx.Graph, nodes: Iterable[fx.Node], before: Any, target: Any) -> None:
    """``node.target = target`` of these calls of ``before``, which looks a node up for each attribute that is set."""
    table = graph._find_nodes_lookup_table.table
    old, new = table["call_function", before], table["call_function", target]
    for node in nodes:
        del old[node]
        object.__setattr__(node, "target", target)
        new[node] = None


def input_for(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A placeholder in another graph, which has no node of its name, for what the node computes; as `copied_node`."""
    made = fx.Node(graph, node.name, "placeholder", node.name, (), {})
    made.meta.update(node.meta)
    _put(graph, made)
    return made


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
