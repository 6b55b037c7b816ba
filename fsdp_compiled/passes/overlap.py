"""Starts collectives along the tp axis as early, and waits for them as late, as the data allows.

    before                                      after

    dx = mm(dy, weight)                         dx = mm(dy, weight)
    dw = mm(t(dy), x)                           sum = all_reduce(dx, "sum", "tp")   # on the wire while dw is computed
    sum = all_reduce(dx, "sum", "tp")           dw = mm(t(dy), x)
    dx = wait(sum)                              dx = wait(sum)
    use(dx)                                     use(dx)
    ...                                         dn = all_reduce(norm's gradient, "sum", "tp")
    dn = all_reduce(norm's gradient, "sum")     ...
    return wait(dn)                             return wait(dn)

DTensor starts a collective where a layout is asked for, and waits at once. Compute waits for the collectives of
*activations*. Such a collective moves up, with the sums and copies that make its input, to the node that computes what
it sends. Its wait moves down, with the copies that lay the result out, to the node that reads the result. In backward
the gradients of weights then run in between; in forward there is seldom anything. These collectives keep their order.

Collectives of *gradients* sum the gradients of weights that all ranks along tp have (norms under sequence parallelism).
No compute reads them, and DTensor makes all of them at the end of backward, where they would delay every unit's
reduction. Each starts behind the start of the next activation's collective, which is needed sooner. Its wait stands
behind the wait for the activation's collective after that, which followed it on the wire.

The order of compute stays the model's own, but for sums that only a collective reads, and nothing leaves its phase.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from operator import getitem

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, is_view, is_wait, mutated, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
# Lay values out in memory, as a collective takes and gives them.
LAYOUT = (getitem, aten.cat.default, aten.clone.default, aten.split.Tensor, aten.split_with_sizes.default)


def overlap(program: Program, plan: Plan) -> Program:
    """Moves the collectives along tp that the model itself has, and their waits; nothing is added or taken away."""
    edit = Edit(program)
    starts = [node for node in edit.graph.nodes if _is_tensor_parallel(node)]
    gradients = {start for start in starts if _is_gradient(start)}
    activations = [start for start in starts if start not in gradients]
    for start in activations:
        _start_early(edit, start)
    for start in reversed(activations):
        for wait in _waits(start):
            _wait_late(edit, wait)
    if gradients:
        order = _Order(edit.graph, activations)
        for start in starts:
            if start in gradients:
                _between(edit, start, order)
    behind = sum(map(_has_compute_behind, starts))
    note = f"overlap: of {len(starts)} collectives along tp, {behind} have compute to hide behind"
    return edit.done("overlap", *([note] if starts else []))


class _Order:
    """The nodes between which gradients' collectives are placed; lists in the order of the graph, which stays."""

    def __init__(self, graph: fx.Graph, activations: Sequence[fx.Node]) -> None:
        self.activations = sorted(activations)
        self.waits = sorted(wait for start in activations for wait in _waits(start))
        self._nodes = list(graph.nodes)
        self._barriers: dict[str, list[fx.Node]] = {}

    def barrier(self, node: fx.Node, phase: str) -> fx.Node:
        """The next barrier of this phase behind the node; the output node is one."""
        if phase not in self._barriers:
            self._barriers[phase] = [one for one in self._nodes if _is_barrier(one, phase)]
        return self._barriers[phase][bisect_right(self._barriers[phase], node)]


def _is_tensor_parallel(node: fx.Node) -> bool:
    """Whether the node starts a collective along tp that the model itself has, and that no pass inserted."""
    return node.op == "call_function" and is_collective(node) and node.args[-1] == "tp" and role_of(node) is None


def _waits(start: fx.Node) -> list[fx.Node]:
    return [user for user in start.users if is_wait(user)]


def _lays_out(node: fx.Node) -> bool:
    return node.op == "call_function" and role_of(node) is None and (node.target in LAYOUT or is_view(node))


def _sent(start: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
    """The collective with the sums and copies that only make its input, and the nodes that these read."""
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
    """Whether the collective's result is nothing but an output of the program."""
    readers = [user for wait in _waits(start) for user in _brought(wait)[1]]
    return bool(readers) and all(user.op == "output" for user in readers)


def _is_barrier(node: fx.Node, phase: str) -> bool:
    return node.op != "call_function" or node.meta["phase"] != phase or bool(mutated(node))


def _start_early(edit: Edit, start: fx.Node) -> None:
    """Moves the start to right behind the last node that computes what is sent."""
    own, sources = _sent(start)
    last = max(sources)
    target, node = start, start.prev
    while node is not last and not (_is_barrier(node, start.meta["phase"]) or _is_tensor_parallel(node)):
        target = target if node in own else node
        node = node.prev
    _move(edit, [node for node in own if node > target], target)


def _wait_late(edit: Edit, wait: fx.Node) -> None:
    """Moves the wait to right before the first node that reads the result."""
    own, readers = _brought(wait)
    first, stop = min(readers, default=None), wait.next
    while stop is not first and not _is_barrier(stop, wait.meta["phase"]):
        stop = stop.next
    _move(edit, [node for node in own if node < stop], stop)


def _between(edit: Edit, start: fx.Node, order: _Order) -> None:
    """Moves the start behind that of the next activation's collective, the wait behind the wait for the one after."""
    own, sources = _sent(start)
    ready = max(sources)
    (wait,) = _waits(start)
    if order.barrier(ready, start.meta["phase"]) < wait:
        return
    next_one = bisect_right(order.activations, ready)
    after = [one for one in order.activations[next_one : next_one + 2] if one < start]
    first = after[0] if after else ready
    brought, _ = _brought(wait)
    waited = bisect_right(order.waits, after[1] if len(after) > 1 else wait)
    if waited < len(order.waits) and (other := order.waits[waited]) < wait:
        _move(edit, brought, other.next)
    _move(edit, [node for node in own if node > first], first.next)


def _move(edit: Edit, nodes: Collection[fx.Node], before: fx.Node) -> None:
    if before not in nodes:
        edit.move(sorted(nodes), before=before)


def _has_compute_behind(start: fx.Node) -> bool:
    """Whether something is computed between the start and the first wait for it."""
    waits = _waits(start)
    if not waits:
        return False
    node, end = start.next, min(waits)
    while node is not end:
        if not (is_collective(node) or is_wait(node) or _lays_out(node) or role_of(node)):
            return True
        node = node.next
    return False
