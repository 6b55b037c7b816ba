"""What is still to be done to gradients, left to passes that come later: to be multiplied, to join their sums.

With the package's own kernels the step reads gradients twice, to measure them and in the update. Whatever scales them
on the way (microbatches, the loss's scale, the rows' share, clipping) multiplies one scalar instead, an output that
the update takes.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, reduction
from fsdp_compiled.ir.program import FACTOR
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def joined_before(gradient: fx.Node, plan: Plan) -> bool:
    """Whether the gradient's sum over microbatches is whole, and joined before the reduction; else after it."""
    return plan.policy.accumulate == "full" and reduction(gradient) is not None


def multiply(edit: Edit, factor: fx.Node, mark: Mark) -> None:
    """All gradients are to be multiplied by one more scalar."""
    known = edit.outputs.get(FACTOR)
    edit.set_output(FACTOR, factor if known is None else edit.call(aten.mul.Tensor, known, factor, mark=mark))


def apply(edit: Edit, plan: Plan) -> None:
    """Multiplies all gradients by what they were still to be multiplied by."""
    factor = edit.outputs.get(FACTOR)
    if factor is None:
        return
    edit.remove_output(FACTOR)
    with edit.at(edit.end, "update"):
        for port, gradient in edit.outputs.items():
            if port.kind == "gradient" and gradient is not None:
                mark = Mark("norm", plan.buffer(port.name).unit, port.name)
                edit.set_output(port, edit.call(aten.mul.Tensor, gradient, factor, mark=mark))
