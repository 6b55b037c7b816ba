"""Checks that ranks along the tp axis see the same batch: each sums its own up, and `report` compares the sums.

    before             after

    batch [0]          rows = sum(bits of batch [0], dim 1); columns = sum(bits of batch [0], dim 0)
    ...                sum = rows @ (1, 2, 3, ...) + columns @ (1, 2, 3, ...) * odd      # int64, which wraps
    return loss        return loss, same = the 40 upper bits of sum * odd, as two numbers below 2**20

Each rank along tp holds a part of every matrix: on other tokens than its peers' it would silently compute nonsense. The
sums are of bits, not of values, and weighted by place, so that a row that is added, missing, changed or moved shows,
and a NaN is a number like any other. The two numbers are exact in float64, as are their squares, summed over thousands
of ranks.

Where ranks along tp must draw the same random numbers (dropout on values that all of them have), the starting numbers
of their generators join the comparison.

A microbatch that does not update adds its numbers to the sums that the last microbatch ends (`accumulate`). A call of
forward alone ends with a comparison of its own (`report.compare_batches`).
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import DRAWN, SAME, SAME_PARTS, Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
MARK = Mark("norm")
ODD = 0x2545F4914F6CDD1D  # of xorshift64*: spreads differences in a few low bits over the upper ones
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_batches(program: Program, plan: Plan) -> Program:
    """Two numbers of the batch join the outputs, float64[2]."""
    edit = Edit(program)
    with edit.at(edit.end, "update"):
        found = [_summed(edit, node) for port, node in edit.inputs.items() if port.kind == "batch"]
        same = _parts(edit, found, plan)
        if any(node.meta.get("shared") for node in edit.graph.nodes):
            drawn = edit.add_input(DRAWN, edit.fake([SAME_PARTS], torch.float64, plan.device))
            same = edit.call(aten.add.Tensor, same, drawn, mark=MARK)
            same = edit.call(aten.remainder.Scalar, same, 2.0**20, mark=MARK)
        edit.set_output(SAME, same)
    return edit.done("same_batches")


def _summed(edit: Edit, node: fx.Node) -> fx.Node:
    """Int64[]: a sum over the tensor's bits, by row and by column."""
    value = node.meta["val"]
    if value.dim() == 0:
        node = edit.call(aten.reshape.default, node, [1], mark=MARK)
    if value.is_complex():
        node = edit.call(aten.view_as_real.default, edit.call(aten.resolve_conj.default, node, mark=MARK), mark=MARK)
    dtype = node.meta["val"].dtype
    bits = BITS[dtype.itemsize]
    if dtype != torch.bool and dtype != bits:
        node = edit.call(aten.view.dtype, node, bits, mark=MARK)
    rows = node.meta["val"].shape[0]
    columns = 1
    for size in node.meta["val"].shape[1:]:
        columns = columns * size
    matrix = edit.call(aten.reshape.default, node, [rows, columns], mark=MARK)
    totals = []
    for dim, length in ((1, rows), (0, columns)):
        sums = edit.call(aten.sum.dim_IntList, matrix, [dim], dtype=torch.int64, mark=MARK)
        places = edit.call(aten.arange.start, 1, length + 1, dtype=torch.int64, device=value.device, mark=MARK)
        totals.append(edit.call(aten.sum.default, edit.call(aten.mul.Tensor, sums, places, mark=MARK), mark=MARK))
    return _mixed(edit, *totals)


def _mixed(edit: Edit, first: fx.Node, second: fx.Node) -> fx.Node:
    spread = edit.call(aten.mul.Scalar, second, ODD, mark=MARK)
    return edit.call(aten.add.Tensor, first, spread, mark=MARK)


def _parts(edit: Edit, sums: list[fx.Node], plan: Plan) -> fx.Node:
    """Float64[2], of the sums of all tensors."""
    if not sums:
        return edit.call(aten.full.default, [SAME_PARTS], 0.0, dtype=torch.float64, device=plan.device, mark=MARK)
    total = sums[0]
    for one in sums[1:]:
        total = _mixed(edit, one, total)
    total = edit.call(aten.mul.Scalar, total, ODD, mark=MARK)
    parts = []
    for shift in (44, 24):
        upper = edit.call(aten.__rshift__.Scalar, total, shift, mark=MARK)
        parts.append(edit.call(aten.__and__.Scalar, upper, 0xFFFFF, mark=MARK))
    both = edit.call(aten.stack.default, parts, mark=MARK)
    return edit.call(aten._to_copy.default, both, dtype=torch.float64, mark=MARK)
