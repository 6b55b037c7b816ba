"""Counts updates in the program, as a part of the step's state.

before              after

...                 ...
                    step += 1             # under a loss scale: += not overflow
"""

from __future__ import annotations

import torch

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import OVERFLOW, STEP, Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def count_updates(program: Program, plan: Plan) -> Program:
    """Adds one to the number of updates, or nothing where the step was void."""
    edit = Edit(program)
    mark = Mark("update")
    overflow = edit.outputs.get(OVERFLOW)
    with edit.at(edit.end, "update"):
        step = edit.add_input(STEP, edit.fake([], torch.int64, plan.device))
        made = 1 if overflow is None else edit.call(aten.logical_not.default, overflow, mark=mark)
        edit.call(aten.add_.Tensor, step, made, mark=mark)
    return edit.done("count_updates", keeps_readers=True)
