"""With the package's own kernels, gradients are read once to be known: their squares, and how many are not finite.

    before                                  after

    return gradient, factor                 squares = measure([gradient, ...], factor, nonfinite)
                                            return gradient, factor, squares = sum(squares), overflow = nonfinite

The factor is what every gradient is still to be multiplied by: 1 / microbatches (see `accumulate`), 1 / the loss's
scale (see `loss_scale`), the rows' share (see `row_weights`), and after this pass the clipping's. The squares are of
the gradients as they will then be; the update applies it, and nothing else reads or writes the gradients. At the end of
microbatches whose shards were added up, they join their sums in the same call:

    return gradient, factor                 squares = accumulate_([gradient, ...], [sum, ...], factor, nonfinite)

`settle` is for the programs that hand gradients out: they leave multiplied.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import FACTOR, OVERFLOW, SQUARES, Port, Program
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.passes.pending import apply, joined_before
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def measure(program: Program, plan: Plan) -> Program:
    """One call for the gradients that an optimizer will use; a second one if some, but not all, have sums to join."""
    edit = Edit(program)
    mark = Mark("norm")
    alone: list[fx.Node] = []
    joined: list[tuple[fx.Node, fx.Node]] = []
    for buffer in plan.buffers:
        gradient = edit.outputs.get(Port("out", "gradient", buffer.key))
        if buffer.updated and gradient is not None:
            total = edit.inputs.get(Port("in", "sum", buffer.key))
            if total is None or joined_before(gradient, plan):
                alone.append(gradient)
            else:
                joined.append((gradient, total))
    if not alone and not joined:
        return program.after("measure")
    with edit.at(edit.end, "update"):
        nonfinite = None
        if plan.policy.scaling is not None:
            nonfinite = edit.call(aten.full.default, [], 0, dtype=torch.int64, device=plan.device, mark=mark)
        scale = edit.outputs.get(FACTOR)
        squares = []
        if alone:
            squares.append(edit.call(operators.measure.default, alone, scale, nonfinite, mark=mark))
        if joined:
            gradients, totals = map(list, zip(*joined, strict=True))
            squares.append(edit.call(operators.accumulate_.default, gradients, totals, scale, nonfinite, mark=mark))
        sums = [edit.call(aten.sum.dim_IntList, one, None, dtype=torch.float64, mark=mark) for one in squares]
        edit.set_output(SQUARES, sums[0] if len(sums) == 1 else edit.call(aten.add.Tensor, *sums, mark=mark))
        if nonfinite is not None:
            count = edit.call(aten._to_copy.default, nonfinite, dtype=torch.float64, mark=mark)
            edit.set_output(OVERFLOW, count)
    return edit.done("measure")


def settle(program: Program, plan: Plan) -> Program:
    """Gradients leave multiplied by what they were still to be multiplied by."""
    edit = Edit(program)
    apply(edit, plan)
    return edit.done("settle")
