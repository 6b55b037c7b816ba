"""Views of computed values become reshapes, which copy where they must.

    before                                       after

    x: float32[6, 4] = softplus_backward(...)    x: float32[6, 4] = softplus_backward(...)
    y = view(x, [24])                            y = reshape(x, [24])

Kernels do not always lay out their results as the fake tensors say (softplus_backward, for one, on a transposed
gradient). A view that was traced on the fake tensors may not exist for the real ones.
"""

from __future__ import annotations

import torch

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def reshape(program: Program, plan: Plan) -> Program:
    """Leaves views that passes made: those are views of gathered buffers, whose layout is as planned."""
    edit = Edit(program)
    views = edit.graph.find_nodes(op="call_function", target=aten.view.default)
    for node in views:
        if role_of(node) is None:
            node.target = aten.reshape.default
    return edit.done("reshape", keeps_readers=True)
