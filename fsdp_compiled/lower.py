"""Program -> callable.

``"eager"`` runs the graph's own code: the ATen kernels of eager PyTorch, in the program's order.

``"inductor"`` cuts the program at its collectives, waits and random operators, which run as they stand, and compiles
the compute between them. Pieces that are the same but for names are compiled once: the blocks of a model share one
forward and one backward piece, and equal buffers share one update, so that compile time does not grow with depth and
the order that the passes chose is the order that runs.

This is the only file that touches private surfaces of Inductor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from fsdp_compiled.kernels.scaled import TENSOR_FORMS
from fsdp_compiled.program import ASSERT, Bare, Program, fake_mode, is_collective, is_random, role_of, written

Runner = Callable[..., Sequence[torch.Tensor]]
wait_tensor = torch.ops._c10d_functional.wait_tensor.default


def lower(program: Program, groups: Mapping[str, str], how: str) -> Runner:
    """A function of the program's inputs, in the order of its ports, that returns its outputs in order.

    ``groups`` gives the name of the process group along each axis; ``how`` is ``Policy.lower``.
    """
    graph = _bind_groups(program.graph, groups)
    if how == "inductor":
        graph = _compile_pieces(graph)
    module = fx.GraphModule(nn.Module(), graph)
    return module.forward


def _bind_groups(source: fx.Graph, groups: Mapping[str, str]) -> fx.Graph:
    """A copy in which collectives name process groups instead of axes."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(source, mapping))
    for node in graph.nodes:
        if node.op == "call_function" and is_collective(node):
            node.args = (*node.args[:-1], groups[str(node.args[-1])])
    return graph


class Piece:
    """Compute between two collectives: nodes of the program in order, cut out as a graph of its own."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        inside = set(nodes)
        self.nodes = _with_views(nodes)
        body = set(self.nodes)
        inputs = dict.fromkeys(source for node in self.nodes for source in node.all_input_nodes if source not in body)
        self.inputs = list(dict.fromkeys([*_sizes_of(inputs), *inputs]))
        self.outputs = [
            node for node in nodes if not _is_parameter_view(node) and any(user not in inside for user in node.users)
        ]

    def graph_module(self) -> fx.GraphModule:
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.inputs):
            mapping[node] = graph.placeholder(f"input_{index}")
            mapping[node].meta["val"] = node.meta["val"]
        for node in self.nodes:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            mapping[node].meta = {"val": node.meta["val"], "example_value": node.meta["val"]}
            _without_host_reads(mapping[node])
        graph.output(tuple(mapping[node] for node in self.outputs))
        return fx.GraphModule(nn.Module(), graph)

    def key(self) -> str:
        """Equal for pieces that compute the same from inputs of the same shapes, strides and dtypes."""
        names: dict[fx.Node, str] = {node: f"i{index}" for index, node in enumerate(self.inputs)}
        names |= {node: f"n{index}" for index, node in enumerate(self.nodes)}
        lines = [_layout(node.meta["val"]) for node in self.inputs]
        for node in self.nodes:
            args = fx.node.map_arg((node.args, node.kwargs), lambda source: Bare(names[source]))
            lines.append(f"{node.target} {args}")
        lines.append(" ".join(names[node] for node in self.outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _layout(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return repr(value)


def _is_size(node: fx.Node) -> bool:
    """Whether the node is a number made of sizes of the batch alone, to be worked out by Python."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat) and all(
        source.op == "placeholder" or _is_size(source) for source in node.all_input_nodes
    )


def _sizes_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The inputs of the program that hold the sizes which these nodes' shapes are made of, such as ``7 * rows``."""
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


def _is_parameter_view(node: fx.Node) -> bool:
    return role_of(node) == "view"


def _with_views(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes, with the views of gathered buffers that they read from outside repeated inside.

    So a piece takes whole buffers and no aliases of them, and indexing them is compiled in.
    """
    inside = set(nodes)
    borrowed: dict[fx.Node, None] = {}

    def borrow(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in inside and source not in borrowed and _is_parameter_view(source):
                borrow(source)
                borrowed[source] = None

    for node in nodes:
        borrow(node)
    return [*borrowed, *nodes]


def _without_host_reads(node: fx.Node) -> None:
    """Replaces operators that read a scalar on the host by their tensor forms."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "fsdp_compiled":
        name = target._schema.name.removeprefix("fsdp_compiled::")
        node.target = TENSOR_FORMS.get(name, target)


def _stands_alone(node: fx.Node) -> bool:
    return is_collective(node) or role_of(node) == "part" or node.target in (wait_tensor, ASSERT) or is_random(node)


def _segments(graph: fx.Graph) -> list[fx.Node | Piece]:
    """The graph in order: what stands alone as it is, the compute between as pieces.

    A piece ends at a phase, and in the update at a buffer, so that equal buffers make equal pieces.
    """
    segments: list[fx.Node | Piece] = []
    nodes: list[fx.Node] = []
    previous: Any = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _is_size(node):
            segments.append(node)  # before the piece that is being filled, of which it needs nothing
            continue
        mark = node.meta.get("mark")
        place = (node.meta["phase"], (mark.unit, mark.buffer) if mark and mark.role == "update" else None)
        if nodes and (place != previous or _stands_alone(node)):
            segments.append(Piece(nodes))
            nodes = []
        previous = place
        if _stands_alone(node):
            segments.append(node)
        else:
            nodes.append(node)
    if nodes:
        segments.append(Piece(nodes))
    return segments


def _compile_pieces(graph: fx.Graph) -> fx.Graph:
    """The same program with a call of a compiled function in the place of each piece."""
    compiled: dict[str, Callable[..., Any]] = {}
    result = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        mapping[node] = result.node_copy(node)
    for segment in _segments(graph):
        if isinstance(segment, fx.Node):
            mapping[segment] = result.node_copy(segment, mapping.__getitem__)
            continue
        if not segment.outputs and not any(written(node) for node in segment.nodes):
            continue
        key = segment.key()
        if key not in compiled:
            compiled[key] = _compile(segment)
        call = result.call_function(compiled[key], tuple(mapping[node] for node in segment.inputs))
        for index, node in enumerate(segment.outputs):
            mapping[node] = result.call_function(getitem, (call, index))
    result.output([mapping[node] for node in graph.output_node().args[0]])  # type: ignore[union-attr, misc]
    return result


def _compile(piece: Piece) -> Callable[..., Any]:
    module = piece.graph_module()
    module = _expand(module)
    examples = [node.meta["val"] for node in piece.inputs]
    artifact = torch._inductor.standalone_compile(module, examples, dynamic_shapes="from_graph")

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return artifact(*inputs)

    run.__name__ = f"piece_{piece.key()[:8]}"
    return run


def _expand(module: fx.GraphModule) -> fx.GraphModule:
    """Traces through the Python functions that `_without_host_reads` put in."""
    if not any(node.target in TENSOR_FORMS.values() for node in module.graph.nodes):
        return module
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with fake_mode(module.graph):
        return make_fx(module)(*examples)
