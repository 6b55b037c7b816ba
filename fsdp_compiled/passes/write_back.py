"""Writes values that outlive the step back in place: updated module buffers and closed-over tensors.

    before                                  after

    mean = batch_norm(...)[3]               mean = batch_norm(...)[3]
    return buffer running_mean: mean        copy_(running_mean, mean)

Last of the passes, so that every reader of the old value has run.
"""

from __future__ import annotations

import torch

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def write_back(program: Program, plan: Plan) -> Program:
    """Turns ``buffer`` and ``constant`` outputs into writes to the inputs of the same names."""
    if not any(port.kind in ("buffer", "constant") for port in program.outputs):
        return program.after("write_back")
    edit = Edit(program)
    with edit.at(edit.end, "update"):
        for port, value in edit.outputs.items():
            if port.kind in ("buffer", "constant") and value is not None:
                target = edit.before(port, value)
                edit.remove_output(port)
                edit.call(aten.copy_.default, target, value, mark=Mark("update"))
    return edit.done("write_back")
