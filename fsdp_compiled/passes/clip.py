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
    norm, most, value = edit.outputs.get(NORM), plan.policy.clip, plan.policy.clip_value
    mark, factor = Mark("norm"), None
    with edit.at(edit.end, "update"):
        if most is not None and norm is not None:
            factor = edit.call(aten.reciprocal.default, edit.call(aten.add.Tensor, norm, EPSILON, mark=mark), mark=mark)
            factor = edit.call(aten.mul.Tensor, factor, float(most), mark=mark)
            factor = edit.call(aten.clamp.default, factor, None, 1.0, mark=mark)
        for buffer in plan.buffers:
            port = Port("out", "gradient", buffer.key)
            gradient = edit.outputs.get(port) if buffer.updated else None
            if gradient is None:
                continue
            if factor is not None:
                gradient = edit.call(aten.mul.Tensor, gradient, factor, mark=Mark("norm", purpose="factor"))
            if value is not None:
                gradient = edit.call(aten.clamp.default, gradient, -float(value), float(value), mark=mark)
            edit.set_output(port, gradient)
    return edit.done("clip", keeps_readers=True)
