"""Gradients are scaled down where their global norm is over `Policy.clip`.

    before                      after

    return gradient             factor = min(1, clip / (norm + 1e-6))
                                return gradient * factor

The formula is that of `torch.nn.utils.clip_grad_norm_`; the norm reported is the one before clipping.
"""

from __future__ import annotations

import torch

from fsdp_compiled.plan import Plan
from fsdp_compiled.program import NORM, Edit, Mark, Port, Program

aten = torch.ops.aten
EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_


def clip(program: Program, plan: Plan) -> Program:
    """Scales every gradient by one factor on the device; without ``Policy.clip`` nothing is added."""
    edit = Edit(program)
    norm = edit.outputs.get(NORM)
    if plan.policy.clip is not None and norm is not None:
        mark = Mark("norm")
        with edit.at(edit.end, "update"):
            factor = edit.call(aten.reciprocal.default, edit.call(aten.add.Tensor, norm, EPSILON, mark=mark), mark=mark)
            factor = edit.call(aten.mul.Tensor, factor, float(plan.policy.clip), mark=mark)
            factor = edit.call(aten.clamp.default, factor, None, 1.0, mark=mark)
            for buffer in plan.buffers:
                port = Port("out", "gradient", buffer.key)
                if buffer.updated and (gradient := edit.outputs.get(port)) is not None:
                    edit.set_output(port, edit.call(aten.mul.Tensor, gradient, factor, mark=mark))
    return edit.done("clip")
