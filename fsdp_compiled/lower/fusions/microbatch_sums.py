"""Adds all shards of a microbatch's gradient to their sums in one pass over memory.

    before                              after

    sum_a += gradient_a                 accumulate_([sum_a, sum_b], [gradient_a, gradient_b])
    sum_b += gradient_b

and in the last microbatch of a row, where the gradient is read again:

    a = gradient_a + sum_a              accumulate_([gradient_a, gradient_b], [sum_a, sum_b])
    b = gradient_b + sum_b
    ...                                 ...
    sum_a = 0                           _foreach_zero_([sum_a, sum_b])
    sum_b = 0

The sums are not cleared where they are read. In between, ranks learn whether all of them make this step; if a rank
breaks off before, every rank still has the sums to make the step again.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, positions, purpose_of, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def microbatch_sums(program: Program, plan: Plan) -> Program:
    """Leaves sums of whole gradients alone: each gradient joins before its reduction, and is freed at once."""
    edit = Edit(program)
    order = {buffer.key: place for place, buffer in enumerate(plan.buffers)}
    additions = [node for node in edit.graph.nodes if purpose_of(node) == "add" and node.meta["phase"] == "update"]
    additions.sort(key=lambda node: order[node.meta["mark"].buffer])
    in_place = [node for node in additions if node.target is aten.add_.Tensor]
    read_again = [node for node in additions if node.target is aten.add.Tensor and set(node.args[0].users) == {node}]  # type: ignore[union-attr]
    for found in (in_place, read_again):
        if found:
            _fuse(edit, found)
    _clear(edit)
    return edit.done("microbatch_sums")


def _fuse(edit: Edit, additions: list[fx.Node]) -> None:
    place = positions(edit.graph)
    begin = min(additions, key=place.__getitem__)
    if any(place[source] > place[begin] for node in additions for source in node.all_input_nodes):
        return
    with edit.at(begin, "update"):
        totals, parts = ([node.args[index] for node in additions] for index in (0, 1))
        edit.call(operators.accumulate_.default, totals, parts, mark=Mark("sum", purpose="add"))
    for node in additions:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        edit.graph.erase_node(node)


def _clear(edit: Edit) -> None:
    """Clears all sums of a dtype in one call."""
    place = positions(edit.graph)
    cleared: dict[torch.dtype, list[fx.Node]] = {}
    for node in edit.graph.find_nodes(op="call_function", target=aten.zero_.default):
        if role_of(node) == "sum":
            cleared.setdefault(node.meta["val"].dtype, []).append(node)
    for nodes in cleared.values():
        with edit.at(max(nodes, key=place.__getitem__), "update"):
            edit.call(aten._foreach_zero_.default, [node.args[0] for node in nodes], mark=Mark("sum"))
        for node in nodes:
            edit.graph.erase_node(node)
