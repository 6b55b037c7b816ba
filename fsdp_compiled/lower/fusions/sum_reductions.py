"""The kernel that flattens gradients divides them, too, and a sum goes over the wire in the place of a mean.

    before                                       after

    flat = flatten([d_up, d_bias], ...)          flat = flatten([d_up, d_bias], ..., 0.125)
    part = reduce_scatter(flat, "avg", "shard")  part = reduce_scatter(flat, "sum", "shard")

NCCL multiplies each rank's numbers by 1 / ranks for a mean, before the sum (`hostToDevRedOp`: ``ncclAvg`` of floats is
``ncclDevPreMulSum``). So the numbers are the same where ranks are a power of two, and at most a rounding apart
otherwise; but plain sums alone are added up inside of switches (NVLS). Along a replicate axis, the all-reduce that
follows becomes a sum with it. A buffer that products write into (`direct_gradients`) has no kernel that could divide it
in passing, and keeps its mean.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, is_wait
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def sum_reductions(program: Program, plan: Plan) -> Program:
    """The fusion, on a program whose gradients are flattened by one operator (`flatten_gradients`)."""
    edit, factors = Edit(program), dict[float, fx.Node]()
    for flat in edit.graph.find_nodes(op="call_function", target=operators.flatten.default):
        means = _means(flat)
        if not means or any(flat.args[4:]):
            continue
        ranks = 1
        for node in means:
            node.args = tuple("sum" if argument == "avg" else argument for argument in node.args)
            ranks *= plan.size(node.args[-1])
        with edit.at(flat, flat.meta["phase"]):
            if 1 / ranks not in factors:
                options = {"dtype": torch.float32, "device": plan.device}
                factors[1 / ranks] = edit.call(aten.full.default, [], 1 / ranks, mark=flat.meta["mark"], **options)
        flat.args = (*flat.args[:4], factors[1 / ranks])
    return edit.done("sum_reductions")


def _means(flat: fx.Node) -> list[fx.Node]:
    """The means over ranks that are taken of it, one of the other, with nothing else that reads them."""
    found, node = [], flat
    while len(node.users) == 1:
        (node,) = node.users
        if is_collective(node) and "avg" in node.args:
            found.append(node)
        elif not is_wait(node):
            break
    return found
