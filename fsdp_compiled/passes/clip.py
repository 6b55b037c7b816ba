"""Gradients are scaled down where their global norm is over `Policy.clip`, or cut at `Policy.clip_value`.

    before                      after, by norm                            after, by value

    return gradient             factor = min(1, clip / (norm + 1e-6))     return clamp(gradient, -value, value)
                                return gradient * factor

The formulas are those of `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`. The norm reported is the one before
clipping.
"""

from __future__ import annotations

import torch

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import NORM, Port, Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_


def clip(program: Program, plan: Plan) -> Program:
    """Adds one factor for all gradients, on the device, or a bound for each element; adds nothing without either."""
    if plan.policy.clip is None and plan.policy.clip_value is None:
        return program.after("clip")
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
                    clipped = edit.call(aten.mul.Tensor, gradient, factor, mark=Mark("norm", purpose="factor"))
                    edit.set_output(port, clipped)
    if (value := plan.policy.clip_value) is not None:
        with edit.at(edit.end, "update"):
            for buffer in plan.buffers:
                port = Port("out", "gradient", buffer.key)
                if buffer.updated and (gradient := edit.outputs.get(port)) is not None:
                    bounded = edit.call(aten.clamp.default, gradient, -float(value), float(value), mark=Mark("norm"))
                    edit.set_output(port, bounded)
    return edit.done("clip", keeps_readers=True)
