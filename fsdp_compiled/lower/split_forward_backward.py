"""Splits a program into forward and backward, and says which values forward saves for backward.

    before                       forward                      backward

    y = mm(x, w)                 y = mm(x, w)                 d_r = tangent
    r = relu(y)                  r = relu(y)                  d_y = where(le(y, 0), 0, d_r)
    d_y = where(le(y, 0), ...)   return result r, saved y     d_w = mm(t(x), d_y)
    d_w = mm(t(x), d_y)                                       return gradient d_w
    return result r, gradient    d_w

So the user writes the loop around it: `loss.backward()` calls the second program with what the first one saved. If
backward reads an input that forward writes (a buffer), its old value is saved, and so is a view of it. For other views,
the viewed tensor is saved: backward makes the views again, in its pieces, where they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.node_copies import copied_node, give_names, input_for, names_of, row_of
from fsdp_compiled.ir.nodes import Mark, Phase, base_of, gathered, is_view, mutated, origin, role_of
from fsdp_compiled.ir.program import Port, Program

aten = torch.ops.aten
LATE = ("gradient", "input gradient")


@dataclass(frozen=True)
class SplitProgram:
    """``saved``: what backward reads, in order: inputs of forward, as ports, then values that forward computed.

    ``read``: the parameters that backward reads, gathered or not, by name.
    """

    forward: Program
    backward: Program
    saved: tuple[Port, ...]
    read: frozenset[str]


def cut(program: Program, later: Phase = "backward") -> SplitProgram:
    """The two halves; the inputs of ``backward`` are what was saved, then tangents. ``later``: its phase."""
    program = _with_views_again(replace(_without_copies(program), donated=True))
    inputs = {node: port for port, node in program.inputs.items()}
    late = {port: node for port, node in program.outputs.items() if port.kind in LATE}
    gradients = set(late.values())
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    behind = _behind(nodes, inputs, later)
    changed = {origin(target) for node in nodes if node not in behind for target in mutated(node)}
    crossing = [
        node
        for node in [*inputs, *nodes]
        if node not in behind
        and inputs.get(node, Port("in", "batch")).kind != "tangent"
        and (node in gradients or not behind.isdisjoint(node.users))
    ]
    computed = [node for node in crossing if node not in inputs or node in changed]
    ports = {node: Port("out", "saved", str(place)) for place, node in enumerate(computed)}
    saved = tuple(ports.get(node) or inputs[node] for node in [*(n for n in crossing if n not in ports), *computed])
    forward = _part(
        program,
        [node for node in nodes if node not in behind],
        [(node, port) for node, port in inputs.items() if port.kind != "tangent"],
        [(node, port) for port, node in program.outputs.items() if port not in late],
        ports,
        changed,
    )
    order = {port: node for node, port in [*inputs.items(), *ports.items()]}
    given = [(order[port], replace(port, side="in")) for port in saved]
    given += [(node, port) for node, port in inputs.items() if port.kind == "tangent"]
    backward = _part(program, [node for node in nodes if node in behind], given, [(n, p) for p, n in late.items()])
    return SplitProgram(forward, backward, saved, _read(program, crossing, behind, inputs))


def _read(
    program: Program, crossing: Iterable[fx.Node], behind: set[fx.Node], inputs: dict[fx.Node, Port]
) -> frozenset[str]:
    """The parameters that these values hold, or that backward makes from them."""
    chains = set().union(*gathered(program.graph).values())
    found: set[str] = set()
    for node in crossing:
        shard = node in inputs and inputs[node].kind == "shard"
        if shard or node in chains or role_of(node) == "kept":
            made = _parameters([node], lambda one: [source for source in one.all_input_nodes if source in chains])
            found |= made or _parameters([node], lambda one: [user for user in one.users if user in behind])
    return frozenset(found)


def _parameters(nodes: list[fx.Node], following: Callable[[fx.Node], list[fx.Node]]) -> set[str]:
    """The names of the parameters that one comes to from these nodes."""
    stack, seen, found = list(nodes), set(nodes), set()
    while stack:
        node = stack.pop()
        if (name := node.meta.get("parameter")) is not None:
            found.add(name)
            continue
        more = [one for one in following(node) if one not in seen]
        seen.update(more)
        stack += more
    return found


def reached(captured: Program) -> dict[str, frozenset[str]]:
    """For each parameter, or input with a gradient: the names of the results on whose derivatives its gradient depends.

    If none of these results has a derivative, autograd leaves no gradient, which differs from a gradient of zeros.
    """
    known: dict[fx.Node, frozenset[str]] = {}
    for port, node in captured.inputs.items():
        known[node] = frozenset([port.key]) if port.kind == "tangent" else frozenset()
    for node in captured.graph.nodes:
        if node.op == "call_function":
            known[node] = frozenset().union(*(known[source] for source in node.all_input_nodes))
    kinds = ("parameter gradient", "input gradient")
    return {port.name: known[node] for port, node in captured.outputs.items() if port.kind in kinds}


def _behind(nodes: Sequence[fx.Node], inputs: dict[fx.Node, Port], later: Phase) -> set[fx.Node]:
    """The nodes that run in backward: those of this phase, those made from them, and those made from tangents."""
    found: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if node.target is getitem:  # an item stays with the node that made it
            if sources[0] in found:
                found.add(node)
        elif node.meta["phase"] == later or any(
            source in found or (source in inputs and inputs[source].kind == "tangent") for source in sources
        ):
            found.add(node)
    return found


def _part(
    program: Program,
    members: Iterable[fx.Node],
    inputs: Sequence[tuple[fx.Node, Port]],
    outputs: Sequence[tuple[fx.Node, Port]],
    saved: dict[fx.Node, Port] | None = None,
    changed: Collection[fx.Node] = (),
) -> Program:
    """A program of these nodes. ``saved``: further outputs; for inputs that the program changes, and for views of them,
    copies of the old values."""
    graph = fx.Graph()
    give_names(graph, names_of(program.graph))
    mapping = {node: input_for(graph, node) for node, _ in inputs}
    before: dict[fx.Node, fx.Node] = {}

    def keep(node: fx.Node) -> None:
        if saved and node in saved and base_of(node) in changed:
            before[node] = graph.call_function(aten.clone.default, (mapping[node],))
            before[node].meta = {"val": node.meta["val"], "phase": "forward", "mark": Mark("update")}

    for node, _ in inputs:
        keep(node)
    for node in members:
        mapping[node] = copied_node(graph, row_of(node), mapping.__getitem__)
        keep(node)
    give_names(graph, names_of(graph))
    kept = [before.get(node) or mapping[node] for node in saved or ()]
    graph.output([*(mapping[node] for node, _ in outputs), *kept])
    ports = (*(port for _, port in inputs), *(port for _, port in outputs), *(saved or {}).values())
    return Program(graph, ports, (*program.history, "cut"))


def _without_copies(program: Program) -> Program:
    """Removes copies of results that nobody else could change: of new tensors that leave the program once."""
    edit = Edit(program)
    leaving = [node for node in edit.outputs.values() if node is not None]
    for port, node in edit.outputs.items():
        if port.kind != "result" or node is None or node.target is not aten.clone.default or node.kwargs:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        alone = source.op == "call_function" and not is_view(source) and role_of(source) is None
        whole = isinstance(source.target, torch._ops.OpOverload) and not mutated(source)
        if alone and whole and source not in leaving and not any(is_view(user) for user in source.users):
            same = source.meta["val"].stride() == node.meta["val"].stride()
            if same and not any(source in mutated(user) for user in source.users):
                leaving.append(source)
                edit.set_output(port, source)
    return edit.done("cut")


def _with_views_again(program: Program) -> Program:
    """Makes backward repeat the views of what forward computed."""
    edit = Edit(program)
    written = {base_of(origin(target)) for node in edit.graph.nodes for target in mutated(node)}
    views: set[fx.Node] = set()
    for node in edit.graph.nodes:
        if node.op == "call_function" and is_view(node) and role_of(node) is None and node.meta["phase"] == "forward":
            source = node.all_input_nodes[0]
            computed = source.op == "call_function" and not is_view(source) and role_of(source) is None
            if source in views or (computed and base_of(source) not in written):
                views.add(node)
    edit.rebuild(views)
    return edit.done("cut")


def whole_gradients(backward: Program) -> Program:
    """Backward without communication: each buffer's flat gradient leaves unchanged, before scaling and reduction.

    ``gradient`` outputs become ``whole gradient`` outputs, ``[numel]`` in the dtype of the reduction; a buffer that no
    result depends on has none.
    """
    edit = Edit(backward)
    for port, node in edit.outputs.items():
        if port.kind != "gradient":
            continue
        while node is not None and role_of(node) != "flatten":
            node = node.all_input_nodes[0]
        if node is not None and node.all_input_nodes:
            edit.set_output(Port("out", "whole gradient", port.name), node)
        edit.remove_output(port)
    edit.sweep()  # this leaves an unused all-reduce that writes its input
    for node in list(edit.graph.nodes):
        if role_of(node) == "reduce" and not node.users:
            edit.graph.erase_node(node)
    return edit.done("whole_gradients")
