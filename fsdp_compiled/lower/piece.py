"""A piece of a program: compute that is compiled as one, with the views that it reads repeated inside, so that it takes
and returns whole tensors and no aliases. Pieces that compute the same have the same key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from fsdp_compiled.ir.nodes import Bare, is_view, mutated, origin, role_of

aten = torch.ops.aten
FEW = 64  # numbers; arithmetic on this many or fewer is not compiled


class Piece:
    """Compute that is compiled as one: nodes of a program in order, with the views that they read."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        own = set(nodes)
        self.nodes = _with_borrowed(nodes, own)
        body = set(self.nodes)
        sources = (origin(source, body) for node in self.nodes for source in node.all_input_nodes)
        inputs = dict.fromkeys(source for source in sources if source not in body)
        self.inputs = list(dict.fromkeys([*_sizes_of(inputs), *inputs]))
        self.outputs = [node for node in nodes if not mutated(node) and any(_outside(node, own))]

    @property
    def writes(self) -> bool:
        return any(mutated(node) for node in self.nodes)

    def graph_module(self, prepare: Callable[[fx.Node], None] = lambda node: None) -> fx.GraphModule:
        """The piece as a module of its own; ``prepare`` may change its nodes."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.inputs):
            mapping[node] = graph.placeholder(f"input_{index}")
            mapping[node].meta["val"] = node.meta["val"]
        for node in self.nodes:
            copy = mapping[node] = graph.node_copy(node, lambda source: mapping[origin(source, mapping)])
            copy.meta = {"val": node.meta["val"], "example_value": node.meta["val"]}
            prepare(copy)
        graph.output(tuple(mapping[node] for node in self.outputs))
        return fx.GraphModule(nn.Module(), graph)

    def key(self) -> str:
        """Equal for pieces that compute the same from inputs of the same shapes, strides and dtypes."""
        names: dict[fx.Node, str] = {node: f"i{index}" for index, node in enumerate(self.inputs)}
        names |= {node: f"n{index}" for index, node in enumerate(self.nodes)}
        lines = [_layout(node.meta["val"]) for node in self.inputs]
        for node in self.nodes:
            args = fx.node.map_arg((node.args, node.kwargs), lambda source: Bare(names[origin(source, names)]))
            lines.append(f"{node.target} {args}")
        lines.append(" ".join(names[node] for node in self.outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_borrowed(node: fx.Node) -> bool:
    """Whether pieces repeat the node instead of passing its value on.

    Pieces repeat all views, except a block's slice of a gathered buffer, which is at another place in every block. They
    also repeat the scaling of a gradient by the clip factor, which is better done where the gradient is read.
    """
    return (is_view(node) and role_of(node) not in ("block", "part", "stored", "restored")) or (
        role_of(node) == "norm" and node.target is aten.mul.Tensor and numel(node) > FEW
    )


def is_size(node: fx.Node) -> bool:
    """Whether the node is a number made only of sizes of the batch, which Python computes."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat) and all(
        source.op == "placeholder" or is_size(source) for source in node.all_input_nodes
    )


def _sizes_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The program's inputs that hold the sizes in these nodes' shapes, such as the ``rows`` of ``7 * rows``."""
    wanted = {
        symbol
        for node in nodes
        if isinstance(value := node.meta["val"], torch.Tensor)
        for size in (*value.shape, *value.stride())
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    if not wanted:
        return []
    places = next(iter(nodes)).graph.find_nodes(op="placeholder")
    return [
        node for node in places if isinstance(value := node.meta["val"], torch.SymInt) and value.node.expr in wanted
    ]


def _with_borrowed(nodes: list[fx.Node], own: Collection[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in found and source not in own and is_borrowed(source):
                add(source)
                found[source] = None

    for node in nodes:
        add(node)
        found[node] = None
    return list(found)


def _outside(node: fx.Node, own: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The nodes outside of ``own`` that read the node, directly or through views."""
    for user in node.users:
        if user.op == "call_function" and is_borrowed(user):
            yield from _outside(user, own)
        elif user not in own:
            yield user


def numel(node: fx.Node) -> int:
    """The number of elements of the node's largest result; more than `FEW` where it is not known before the run."""
    value = node.meta["val"]
    sizes = [leaf.numel() for leaf in (value if isinstance(value, tuple | list) else [value]) if is_tensor(leaf)]
    return max((size if isinstance(size, int) else FEW + 1 for size in sizes), default=0)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _layout(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return repr(value)
