"""A reduce-scatter over gloo, as an exchange and a sum.

    before                                       after

    part = reduce_scatter(flat, "avg", 2)        rows = all_to_all(flat)      # what each rank has for this one
    part' = wait(part)                           part' = add_up(wait(rows), 2, "avg")

gloo has no reduce-scatter: PyTorch all-reduces a copy of the buffer and keeps a slice (ProcessGroupGloo's
``reduce_scatter_tensor_coalesced``), so that each rank sends 2 (W - 1) / W of it where (W - 1) / W would do. Here the
sum is of W slices in the order of the ranks: the same for two of them, and for more as close as any other order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, fx

from fsdp_compiled.ir.nodes import is_wait

c10d = torch.ops._c10d_functional
Value = Callable[[fx.Node], fx.Node]


def is_over(node: fx.Node, groups: Collection[str]) -> bool:
    """Whether the node is the reduce-scatter of a flat buffer on CPUs, among several ranks of one of these groups."""
    if node.target is not c10d.reduce_scatter_tensor.default:
        return False
    (_flat, how, world, group), part = node.args, node.meta["val"]
    return how in ("sum", "avg") and world != 1 and group in groups and part.dim() == 1 and part.device.type == "cpu"


def copy_exchanged(node: fx.Node, graph: fx.Graph, value: Value, groups: Collection[str]) -> fx.Node:
    """A copy of the node in ``graph``, its arguments by ``value``; a reduce-scatter over ``groups``, and the wait for
    it, in their other form."""
    if is_over(node, groups):
        flat, _how, world, group = node.args
        slices = [flat.meta["val"].numel() // world] * world  # type: ignore[operator, union-attr]
        return graph.call_function(c10d.all_to_all_single.default, (value(flat), slices, slices, group))  # type: ignore[arg-type]
    copy = graph.node_copy(node, value)
    if is_wait(node) and is_over(reduction := node.all_input_nodes[0], groups):
        return graph.call_function(add_up, (copy, *reduction.args[2:0:-1]))
    return copy


def add_up(rows: Tensor, world: int, how: str) -> Tensor:
    """The sum, or with ``"avg"`` the mean, of ``world`` slices that lie one after the other in the 1-d ``rows``."""
    total = torch.add(*rows.chunk(2)) if world == 2 else rows.view(world, -1).sum(0)
    return total.div_(world) if how == "avg" else total
