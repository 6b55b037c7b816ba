"""What becomes of the graph of an optimizer's step after its trace: it reads a gradient and writes none, makes its own
numbers, and is for flat shards of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.nodes import mutated
from fsdp_compiled.optim.twin import Untraceable

aten = torch.ops.aten


def drop_predicates(graph: fx.Graph, keep: int) -> None:
    output = graph.output_node()
    output.args = (tuple(output.args[0])[:keep],) if keep else (None,)  # type: ignore[arg-type]


def read_gradient_from_a_copy(graph: fx.Graph) -> None:
    """A gradient that the code writes is copied first: it may be the sum over microbatches, or be read again."""
    gradient = graph.find_nodes(op="placeholder")[1]
    if any(gradient in mutated(node) for node in gradient.users):
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            copy = graph.call_function(aten.clone.default, (gradient,))
        copy.meta["val"] = gradient.meta["val"]
        gradient.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def inline_constants(traced: fx.GraphModule) -> None:
    """Numbers that the optimizer's code wrapped in 0-d tensors become operators that make them."""
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, str(node.target))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise Untraceable(f"its step closes over {node.target}")
        with traced.graph.inserting_before(node):
            made = traced.graph.call_function(
                aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        made.meta = dict(node.meta)
        made.meta["val"] = torch.empty((), dtype=value.dtype, device="meta")
        node.replace_all_uses_with(made)
        traced.graph.erase_node(node)


def for_size(graph: fx.Graph, shape: Sequence[int], numel: int) -> fx.Graph:
    """The graph, where sizes that the code wrote out (``torch.zeros(p.shape)``) are those of a flat shard."""
    whole = list(shape)

    def flat(value: Any) -> Any:
        return [numel] if isinstance(value, list | tuple) and whole and list(value) == whole else value

    if not any(flat(argument) is not argument for node in graph.nodes for argument in node.args):
        return graph
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copy.node_copy(node, mapping.__getitem__)
        mapping[node].args = tuple(map(flat, mapping[node].args))
    return copy


def text_of(graph: fx.Graph, shape: Sequence[int]) -> str:
    """The graph as text, the same for all shapes that it is the same for."""
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in for_size(graph, shape, -1).nodes)
