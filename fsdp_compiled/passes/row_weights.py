"""Weighs ranks by the rows of their batches: the step is that of one process on all rows, however they are spread.

    before                              after

    flat = cat(d_weight, d_bias)        flat = cat(d_weight, d_bias)                      # weigh
                                        flat = where(rows > 0, flat * rows, 0)
    part = reduce_scatter(flat, "avg")  part = reduce_scatter(flat, "avg")
    return buffer running_mean: mean    return buffer running_mean: where(rows > 0, mean, running_mean)
    ...                                 (report: sum of loss * rows, and of rows, in the message that there is)
    return gradient                     return gradient / (sum of rows / world)           # unweigh

A mean loss over n rows counts n times. Gradients are divided by the sum of all rows, on the shards, once the loss is
reported and the sum is known: no collective is added. A rank with no rows takes part with zeros, whatever its numbers
are (zero times NaN is NaN), and leaves its buffers as they were.
"""

from __future__ import annotations

import torch

from fsdp_compiled.ir.edit import Edit, weighed
from fsdp_compiled.ir.nodes import Mark, reduction
from fsdp_compiled.ir.program import NORM, WEIGHT, Port, Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def weigh(program: Program, plan: Plan) -> Program:
    """Gradients are multiplied by this rank's rows before their reduction; the rows are one more output."""
    edit = Edit(program)
    rows = edit.add_input(Port("in", "rows"), edit.fake([], torch.float64, plan.device))
    for port, value in edit.outputs.items():
        if port.kind == "gradient" and value is not None:
            mark = Mark("weigh", plan.buffer(port.name).unit, port.name)
            start = reduction(value)
            if start is None:
                with edit.at(edit.end, "update"):
                    edit.set_output(port, weighed(edit, value, rows, mark))
            else:
                (flat,) = start.all_input_nodes
                with edit.at(start, start.meta["phase"]):
                    start.replace_input_with(flat, weighed(edit, flat, rows, mark))
        elif port.kind in ("buffer", "constant") and value is not None:
            mark = Mark("weigh")
            with edit.at(edit.end, "update"):
                any_rows = edit.call(aten.gt.Scalar, rows, 0, mark=mark)
                before = edit.before(port, value)
                edit.set_output(port, edit.call(aten.where.self, any_rows, value, before, mark=mark))
    edit.set_output(WEIGHT, rows)
    return edit.done("weigh")


def unweigh(program: Program, plan: Plan) -> Program:
    """Gradients and their norm are divided by the ranks' mean number of rows; all are zero where there is none."""
    edit = Edit(program)
    mean = edit.outputs[WEIGHT]
    with edit.at(edit.end, "update"):
        one = edit.call(aten.reciprocal.default, mean, mark=Mark("norm"))
        any_rows = edit.call(aten.gt.Scalar, mean, 0, mark=Mark("norm"))
        factor = edit.call(aten.where.ScalarOther, any_rows, one, 0.0, mark=Mark("norm"))
        for port, gradient in edit.outputs.items():
            if port.kind == "gradient" and gradient is not None:
                mark = Mark("norm", plan.buffer(port.name).unit, port.name, "factor")
                edit.set_output(port, edit.call(aten.mul.Tensor, gradient, factor, mark=mark))
        if (norm := edit.outputs.get(NORM)) is not None:
            exact = edit.call(aten.mul.Tensor, norm, factor, mark=Mark("norm"))
            edit.set_output(NORM, edit.call(aten._to_copy.default, exact, dtype=torch.float32, mark=Mark("norm")))
    edit.remove_output(WEIGHT)
    return edit.done("unweigh")
