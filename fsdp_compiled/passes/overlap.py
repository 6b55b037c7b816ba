"""Collectives along the tp axis start as soon, and are waited for as late, as data allows.

    before                                      after

    dx = mm(dy, weight)                         dx = mm(dy, weight)
    dw = mm(t(dy), x)                           sum = all_reduce(dx, "sum", "tp")   # on the wire while dw is computed
    sum = all_reduce(dx, "sum", "tp")           dw = mm(t(dy), x)
    dx = wait(sum)                              dx = wait(sum)
    use(dx)                                     use(dx)
    ...                                         dn = all_reduce(norm's gradient, "sum", "tp")
    dn = all_reduce(norm's gradient, "sum")     ...
    return wait(dn)                             return wait(dn)

DTensor starts a collective where a layout is asked for, and waits at once. *Activations* are waited for by compute:
their collectives, with the sums and copies that make the input, move up to what they send, and waits, with the copies
that lay the result out, down to what reads it. In backward the gradients of weights then stand between; in forward
there is seldom anything. They keep their order among each other.

Sums of *gradients* of weights that all ranks along tp have (norms under sequence parallelism) are nobody's input, and
DTensor makes all of them at the end of backward, where they would hold every unit's reduction up. Each starts behind
the next activation's collective, which is needed sooner, and is waited for where the one after that has come in, which
was behind it on the wire.

The order of compute stays the model's own, but for sums that a collective alone reads, and nothing leaves its phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, is_view, is_wait, mutated, positions, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
# Lay values out in memory, as a collective takes and gives them.
LAYOUT = (getitem, aten.cat.default, aten.clone.default, aten.split.Tensor, aten.split_with_sizes.default)


def overlap(program: Program, plan: Plan) -> Program:
    """Moves the collectives along tp that the model itself has, and their waits; nothing is added or taken away."""
    edit = Edit(program)
    starts = [node for node in edit.graph.nodes if _is_tensor_parallel(node)]
    activations = [start for start in starts if not _is_gradient(start)]
    for start in activations:
        _start_early(edit, start)
    for start in reversed(activations):
        for wait in _waits(start):
            _wait_late(edit, wait)
    for start in starts:
        if start not in activations:
            _between(edit, start, activations)
    behind = sum(_has_compute_behind(edit.graph, start) for start in starts)
    note = f"overlap: of {len(starts)} collectives along tp, {behind} have compute to hide behind"
    return edit.done("overlap", *([note] if starts else []))


def _is_tensor_parallel(node: fx.Node) -> bool:
    """Whether the node starts a collective that the model has by itself, which is none that a pass inserted."""
    return node.op == "call_function" and is_collective(node) and node.args[-1] == "tp" and role_of(node) is None


def _waits(start: fx.Node) -> list[fx.Node]:
    return [user for user in start.users if is_wait(user)]


def _lays_out(node: fx.Node) -> bool:
    return node.op == "call_function" and role_of(node) is None and (node.target in LAYOUT or is_view(node))


def _sent(start: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
    """The collective with the sums and copies that make its input for it alone, and the nodes which these are of."""
    own, stack = {start}, [start]
    while stack:
        for source in stack.pop().all_input_nodes:
            made_for = _lays_out(source) or (source.target is aten.add.Tensor and role_of(source) is None)
            if source not in own and made_for and all(user in own for user in source.users):
                own.add(source)
                stack.append(source)
    return own, [source for node in own for source in node.all_input_nodes if source not in own]


def _brought(wait: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
    """The wait with the copies that lay its result out, and the nodes that read these."""
    own, stack = {wait}, [wait]
    while stack:
        for user in stack.pop().users:
            if user not in own and _lays_out(user) and all(source in own for source in user.all_input_nodes):
                own.add(user)
                stack.append(user)
    return own, [user for node in own for user in node.users if user not in own]


def _is_gradient(start: fx.Node) -> bool:
    """Whether what it brings is nothing but an output of the program."""
    readers = [user for wait in _waits(start) for user in _brought(wait)[1]]
    return bool(readers) and all(user.op == "output" for user in readers)


def _is_barrier(node: fx.Node, phase: str) -> bool:
    return node.op != "call_function" or node.meta["phase"] != phase or bool(mutated(node))


def _start_early(edit: Edit, start: fx.Node) -> None:
    """To right behind the node that makes the last of what is sent."""
    order, nodes = positions(edit.graph), list(edit.graph.nodes)
    own, sources = _sent(start)
    target = order[start]
    for place in range(order[start] - 1, max(order[source] for source in sources), -1):
        node = nodes[place]
        if _is_barrier(node, start.meta["phase"]) or _is_tensor_parallel(node):
            break
        target = target if node in own else place
    _move(edit, [node for node in own if order[node] > target], nodes[target])


def _wait_late(edit: Edit, wait: fx.Node) -> None:
    """To right before the first node that reads what came."""
    order, nodes = positions(edit.graph), list(edit.graph.nodes)
    own, readers = _brought(wait)
    stop = order[wait] + 1
    while nodes[stop] not in readers and not _is_barrier(nodes[stop], wait.meta["phase"]):
        stop += 1
    _move(edit, [node for node in own if order[node] < stop], nodes[stop])


def _between(edit: Edit, start: fx.Node, activations: Sequence[fx.Node]) -> None:
    """Behind the start of the next activation's collective, waited for behind the wait for the one after that."""
    order, nodes = positions(edit.graph), list(edit.graph.nodes)
    own, sources = _sent(start)
    ready = max(order[source] for source in sources)
    (wait,) = _waits(start)
    if any(_is_barrier(node, start.meta["phase"]) for node in nodes[ready + 1 : order[wait]]):
        return
    after = sorted(order[one] for one in activations if ready < order[one] < order[start])
    first = after[0] if after else ready
    brought, _ = _brought(wait)
    early = [place for one in activations for other in _waits(one) if (place := order[other]) > first]
    waited = sorted(place for place in early if place > (after[1] if len(after) > 1 else order[wait]))
    if waited and waited[0] < order[wait]:
        _move(edit, brought, nodes[waited[0] + 1])
    _move(edit, [node for node in own if order[node] > first], nodes[first + 1])


def _move(edit: Edit, nodes: set[fx.Node] | list[fx.Node], before: fx.Node) -> None:
    order = positions(edit.graph)
    if before not in nodes:
        edit.move(sorted(nodes, key=order.__getitem__), before=before)


def _has_compute_behind(graph: fx.Graph, start: fx.Node) -> bool:
    """Whether something is computed between the start and the first wait for it."""
    order = positions(graph)
    between = list(graph.nodes)[order[start] + 1 : min((order[wait] for wait in _waits(start)), default=0)]
    return any(not (is_collective(node) or is_wait(node) or _lays_out(node) or role_of(node)) for node in between)
