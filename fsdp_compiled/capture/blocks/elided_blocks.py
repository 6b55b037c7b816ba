"""Writes out a few of many equal blocks in a row, each of which is one node. The others become copies of these.

    what Dynamo traced       0  1  b2  b3  b4  b5  b6  b7  b8  after
    differentiated           0  1   2   3   4           7   8  after        (`repeats`)

Nodes that stand for blocks, and the nodes between two of them, are compared like any others (`equal_blocks`). Once
Dynamo is done, `inlined` writes out the blocks that Dynamo did not trace: the graph is then the one that Dynamo would
give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.blocks.equal_blocks import runs_of, texts_of
from fsdp_compiled.capture.blocks.templates import BLOCK, OWN, Line, own_tensor, result_of
from fsdp_compiled.capture.blocks.written_blocks import RepeatError, WrittenBlock
from fsdp_compiled.capture.guards import OWN as OWN_TENSOR
from fsdp_compiled.capture.guards import plain_names
from fsdp_compiled.capture.source_lines import path_in
from fsdp_compiled.ir.program import Port


@dataclass(frozen=True)
class Inlined:
    """A graph with its blocks written out. ``inputs``: include the blocks' own tensors. ``nodes``: for each old node
    its copy, or all nodes of the block that it stood for."""

    module: fx.GraphModule
    inputs: list[Any]
    nodes: Mapping[fx.Node, list[fx.Node]]


def blocks_of(graph: fx.Graph) -> dict[fx.Node, WrittenBlock]:
    """The blocks for which one node stands, by that node."""
    return {node: node.meta[BLOCK] for node in graph.nodes if BLOCK in node.meta}


def inlined(module: fx.GraphModule, inputs: Sequence[Any], instead: Mapping[fx.Node, fx.Node]) -> Inlined:
    """A copy of Dynamo's graph with its blocks written out. ``instead``: nodes that are left out, each with the node
    to read in its place."""
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
    """Makes the own tensors of written blocks inputs of Dynamo's graph, and returns all of its inputs.

    Raises `RepeatError` if Dynamo also read a block's own tensor by another name: no guard checks that both names stay
    one tensor. Parameters and buffers that are tied by the model's own names are excepted: other code checks them.
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


BEFORE, AFTER = 3, 3  # stretches that are written out around a gap: enough for a run of their own


@dataclass(frozen=True)
class Gap:
    """Stretches to leave out of a graph in which a node stands for each block. ``before``: the last stretch before
    them; ``left``: the stretches; ``after``: the first node after them."""

    before: list[fx.Node]
    left: list[list[fx.Node]]
    after: fx.Node

    def instead(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Pairs of a node that is left out and the node to read in its place."""
        for stretch in self.left:
            yield from zip(stretch, self.before, strict=True)


def gaps_of(
    module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], ports: Mapping[int, Port]
) -> list[Gap]:
    """The gaps of a graph. ``ports``: those of the model's tensors, by identity. All tensors of blocks must be among
    these, and nothing else may read them."""
    blocks = blocks_of(module.graph)
    tensors = [one for block in blocks.values() for one in block.tensors]
    found = set(map(id, tensors))
    if len(found) < len(tensors) or not found <= ports.keys() or any(id(one) in found for one in inputs):
        return []

    def starts(_: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[list[int]]:
        lists: dict[Any, list[int]] = {}
        for place, node in enumerate(nodes):
            if node in blocks:
                lists.setdefault(node.target, []).append(place)
        return [one for one in lists.values() if len(one) > BEFORE + AFTER]

    gaps = []
    values = [*(value for value in inputs if isinstance(value, torch.Tensor)), *tensors]
    storages = [value.untyped_storage()._cdata for value in values]
    shared = {storage for storage, count in Counter(storages).items() if count > 1}
    sharing = {id(value) for value, storage in zip(values, storages, strict=True) if storage in shared}

    def kinds(stretch: Sequence[fx.Node]) -> list[Any]:
        return [
            # (and whether it is a parameter, as `isinstance` has it)
            (ports[id(one)].kind, one.is_leaf, type(one), getattr(one, "_is_param", False), id(one) in sharing)
            for node in stretch
            if node in blocks
            for one in blocks[node].tensors
        ]

    for run in runs_of(module, inputs, given, starts):
        before, left = run.stretches[BEFORE - 1], run.stretches[BEFORE:-AFTER]
        wanted = kinds(before)
        if not any(run.own) and left and not any(one[-1] for one in wanted):
            if all(kinds(stretch) == wanted for stretch in left):
                gaps.append(Gap(before, left, run.stretches[-AFTER][0]))
    return gaps


@dataclass(frozen=True)
class Absent:
    """A stretch that was left out. ``ports``: the ports of its blocks' own tensors."""

    ports: list[Port]
    texts: list[str]  # the path and the stack trace that each of its nodes would have


@dataclass(frozen=True)
class Elided:
    """Stretches that are left out of a written graph, between the stretch that begins with ``before`` and the next.

    own  for each port of the stretch before, its place in the list ``ports`` of an absent stretch
    """

    before: fx.Node
    after: fx.Node
    own: Mapping[Port, int]
    stretches: list[Absent]


def elided(gap: Gap, module: fx.GraphModule, out: Inlined, ports: Mapping[int, Port]) -> Elided:
    """The stretches of a gap. ``module``: has one node for each block; ``out``: the graph written out of it."""
    lines: dict[fx.Node, list[Line]] = {}
    for node in gap.before:
        if (block := node.meta.get(BLOCK)) is not None:
            pairs = zip(block.walked.template.lines, out.nodes[node], strict=True)
            lines[node] = [line for line, made in pairs if not made._erased]

    traces: dict[tuple[int, str], list[str]] = {}

    def absent(stretch: Sequence[fx.Node]) -> Absent:
        own, texts = [], []
        for node, like in zip(stretch, gap.before, strict=True):
            if (block := node.meta.get(BLOCK)) is not None:
                own += [ports[id(tensor)] for tensor in block.tensors]
                texts += _texts(block, lines[like], traces)
            elif like in out.nodes:
                texts += texts_of(module, node)
        return Absent(own, texts)

    first, after = (next(one for one in out.nodes[node] if not one._erased) for node in (gap.before[0], gap.after))
    mine = absent(gap.before).ports
    return Elided(first, after, {port: place for place, port in enumerate(mine)}, list(map(absent, gap.left)))


def _texts(block: WrittenBlock, lines: Sequence[Line], traces: dict[tuple[int, str], list[str]]) -> list[str]:
    """The paths and stack traces of these lines of a block, as `texts_of` gives them for nodes. ``traces``: a cache of
    the stack traces, by where a block is called: most are called in one place."""
    walked, call = block.walked, block.call
    one, other = path_in([walked.call.path]), path_in([call.path])
    paths = [other + path.removeprefix(one) if inside else path for path, inside in walked.paths]
    if (trace := traces.get((id(lines), call.trace))) is None:
        trace = [call.trace + line.user if line.stack is not None else "" for line in lines]
        traces[id(lines), call.trace] = trace
    found = [""] * (2 * len(lines))
    found[::2] = [paths[line.stack] if line.stack is not None else "" for line in lines]
    found[1::2] = trace
    return found
