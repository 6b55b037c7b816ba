"""Inlines, once Dynamo is done, the blocks that it did not trace: the graph is then what Dynamo would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from fsdp_compiled.capture.blocks.templates import BLOCK, OWN, own_tensor, result_of
from fsdp_compiled.capture.blocks.written_blocks import RepeatError, WrittenBlock
from fsdp_compiled.capture.guards import OWN as OWN_TENSOR
from fsdp_compiled.capture.guards import plain_names


@dataclass(frozen=True)
class Inlined:
    """``inputs``: own tensors of blocks are among them. ``nodes``: what became of a node that stands for a block, all
    of it, else the node's copy."""

    module: fx.GraphModule
    inputs: list[Any]
    nodes: Mapping[fx.Node, list[fx.Node]]


def blocks_of(graph: fx.Graph) -> dict[fx.Node, WrittenBlock]:
    """Those that one node stands for."""
    return {node: node.meta[BLOCK] for node in graph.nodes if BLOCK in node.meta}


def inlined(module: fx.GraphModule, inputs: Sequence[Any], instead: Mapping[fx.Node, fx.Node]) -> Inlined:
    """A copy of what Dynamo traced, with all of its blocks. ``instead``: nodes that are left out, and what is read in
    their place."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    nodes: dict[fx.Node, list[fx.Node]] = {}
    made: dict[fx.Node, Mapping[fx.Node, fx.Node]] = {}

    def read(node: fx.Node) -> fx.Node:
        return copies[instead.get(node, node)]

    for node in module.graph.nodes:
        if node in instead:
            continue
        if (block := node.meta.get(BLOCK)) is not None:
            given = [read(one) for one in node.args]  # type: ignore[arg-type]
            made[node] = block.write_out(graph, given)
            nodes[node] = [made[node][line.node] for line in block.walked.template.lines]
        elif node.target is result_of:
            of, place = node.args
            result = made[of][of.meta[BLOCK].walked.results[place]]  # type: ignore[index,union-attr]
            result.meta["example_value"] = node.meta["example_value"]
            copies[node] = result
        else:
            copy = copies[node] = graph.node_copy(node, read)
            nodes[node] = [copy]
            if hasattr(node, "_dynamo_source"):
                copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    for block in made:
        for node in reversed(nodes[block]):
            if node.target is getitem and not node.users:  # as Dynamo does
                graph.erase_node(node)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    return Inlined(copy, with_own_tensors(graph, inputs), nodes)


def with_own_tensors(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of Dynamo's graph, and the own tensors of written blocks, which are inputs of it from now on.

    Raises `RepeatError` for a tensor that a block has and that was walked through, too: Dynamo came to it by one of two
    names. That the model's parameters and buffers stay tied, by their own names, is watched otherwise.
    """
    places = graph.find_nodes(op="placeholder")
    known = dict(zip(map(id, inputs), places, strict=True))
    found, written = list(inputs), set()
    before = next(node for node in graph.nodes if node.op != "placeholder")
    while before.target is own_tensor:
        before = before.next
    for node in graph.find_nodes(op="call_function", target=own_tensor):
        own = node.meta.pop(OWN)
        place = known.get(id(own.example)) if node.users else None
        if place is None and node.users:
            node.op, node.target = "placeholder", f"own_{len(found)}"
            node._dynamo_source = own.source  # type: ignore[attr-defined]
            before.prepend(node)
            known[id(own.example)] = node
            written.add(node)
            found.append(own.example)
            continue
        if place is not None:
            if place not in written:  # Dynamo read the tensor, too, but later
                for name in (own.source.name, place._dynamo_source.name):
                    if not OWN_TENSOR.match(name):
                        raise RepeatError(f"nothing asks whether {plain_names(name)} stays what it is twice")
                node.meta["example_value"] = place.meta["example_value"]
                written.add(place)
                place.meta = node.meta
                place._dynamo_source = own.source  # type: ignore[attr-defined]
            node.replace_all_uses_with(place)
        graph.erase_node(node)
    return found
