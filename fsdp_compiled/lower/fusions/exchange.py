"""A reduce-scatter over gloo, as an exchange and a sum.

    before                                       after

    part = reduce_scatter(flat, "avg", 4)        rows = all_to_all(flat)      # what each rank has for this one
    part' = wait(part)                           part' = combine(wait(rows), 4, "avg")

gloo has no reduce-scatter: PyTorch all-reduces a copy of the buffer and keeps a slice (ProcessGroupGloo's
``reduce_scatter_tensor_coalesced``), so that each rank sends 2 (W - 1) / W of it where (W - 1) / W would do. Here the
sum is of W slices in the order of the ranks: another than gloo's, and as close as any. Two numbers have one sum: among
two ranks it is gloo's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor, fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_wait
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

c10d = torch.ops._c10d_functional

torch.library.define("fsdp_compiled_cpu::combine", "(Tensor rows, int world, str how) -> Tensor")


def _combine(rows: Tensor, world: int, how: str) -> Tensor:
    """The sum, or with ``"avg"`` the mean, of ``world`` slices that lie one after the other in the 1-d ``rows``."""
    total = rows.view(world, -1).sum(0)
    return total.div_(world) if how == "avg" else total


torch.library.impl("fsdp_compiled_cpu::combine", "CPU", _combine)
torch.library.register_fake(
    "fsdp_compiled_cpu::combine", lambda rows, world, how: rows.new_empty(rows.numel() // world)
)
combine = torch.ops.fsdp_compiled_cpu.combine.default


def exchange(axes: Collection[str]) -> Callable[[Program, Plan], Program]:
    """The fusion for reductions along these axes, which gloo carries out."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        for node in edit.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
            if is_over(node, axes):
                _exchange(edit, node)
        return edit.done("exchange")

    return transform


def is_over(node: fx.Node, axes: Collection[str]) -> bool:
    """Whether the reduce-scatter is of a flat buffer on CPUs, along one of these axes."""
    (_flat, how, world, axis), part = node.args, node.meta["val"]
    return how in ("sum", "avg") and world > 1 and axis in axes and part.dim() == 1 and part.device.type == "cpu"


def _exchange(edit: Edit, node: fx.Node) -> None:
    flat, how, world, axis = node.args
    slices = [flat.meta["val"].numel() // world] * world  # type: ignore[operator, union-attr]
    waits = [user for user in node.users if is_wait(user)]
    node.target, node.args = c10d.all_to_all_single.default, (flat, slices, slices, axis)
    edit.infer(node)
    for wait in waits:
        edit.infer(wait)
        with edit.at(wait.next, wait.meta["phase"]):
            total = edit.call(combine, wait, world, how, mark=replace(wait.meta["mark"], role="combine"))
        wait.replace_all_uses_with(total, delete_user_cb=lambda user, own=total: user is not own)
