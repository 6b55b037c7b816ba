"""Recomputes chosen saved values in backward, so that a step fits its memory.

    before                                after, for ``{"gelu_3"}``

    u = mm(x, up)                         u = mm(x, up)
    gelu_3 = gelu(u)                      gelu_3 = gelu(u)              # freed after its last use in forward
    ...                                   ...
    d_down = mm(t(gelu_3), d_y)           gelu_3' = gelu(u)
                                          d_down = mm(t(gelu_3'), d_y)

Which ones, `runtime.programs.memory_budget` chooses (`analysis.saved_values`). It runs before `recompute`, which then
gathers again the parameters that are read by what is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan


def recompute_saved(names: Collection[str]) -> Callable[[Program, Plan], Program]:
    """The pass for forward nodes of these names: backward reads repetitions of them."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        edit.rebuild({node for node in edit.graph.nodes if node.name in names})
        return edit.done("recompute_saved")

    return transform
