"""The update of parameters of `fully_shard` as one program over their flat shards: norm, clip, the optimizer's rules.

in      shards, flat gradients, the optimizer's state, its rates
norm    squares of the gradients' shards, summed over the ranks        where there is a norm to clip at
clip    gradient * min(1, max_norm / (norm + 1e-6))
update  the optimizer's own code, traced over each flat shard (`passes.update`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import NORM, Port, Program
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.passes.clip import clip
from fsdp_compiled.passes.report import squares_of
from fsdp_compiled.passes.update import update
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def update_program(plan: Plan, rules: Sequence[Rule]) -> Program:
    """The program for this plan, whose ``policy.clip`` is the norm to clip at. Gradients are inputs of kind ``sum``."""
    program = _begin(plan)
    if plan.policy.clip is not None:
        program = clip(_with_norm(program, plan), plan)
    return update(rules)(program, plan)


def _begin(plan: Plan) -> Program:
    """Shards and gradients go in, gradients come out."""
    graph, mode = fx.Graph(), FakeTensorMode()
    ports: list[Port] = []
    gradients: list[fx.Node] = []
    for buffer in plan.buffers:
        if buffer.updated:
            for kind in ("shard", "sum"):
                node = graph.placeholder(f"{kind}_{len(ports)}")
                with mode:
                    node.meta["val"] = torch.empty(buffer.numel // plan.shard, dtype=buffer.dtype, device=plan.device)
                node.meta["phase"] = "update"
                ports.append(Port("in", kind, buffer.key))  # type: ignore[arg-type]
            gradients.append(node)
    graph.output(gradients)
    out = [Port("out", "gradient", buffer.key) for buffer in plan.buffers if buffer.updated]
    return Program(graph, (*ports, *out), ())


def _with_norm(program: Program, plan: Plan) -> Program:
    """With the global norm, float32, as an output."""
    edit, mark = Edit(program), Mark("norm")
    gradients = {buffer: edit.inputs[Port("in", "sum", buffer.key)] for buffer in plan.buffers if buffer.updated}
    with edit.at(edit.end, "update"):
        squares = squares_of(edit, gradients, plan, mark)
        if plan.shard > 1:
            squares = edit.call(c10d.all_reduce.default, squares, "sum", "shard", mark=mark)
            squares = edit.call(c10d.wait_tensor.default, squares, mark=mark)
        norm = edit.call(aten.sqrt.default, squares, mark=mark)
        edit.set_output(NORM, edit.call(aten._to_copy.default, norm, dtype=torch.float32, mark=mark))
    return edit.done("norm")


def updated_by(plan: Plan, groups: Sequence[int | None]) -> Plan:
    """The plan, each of whose buffers is updated by the rule of that param group, or by none."""
    numbers = iter(groups)
    units = tuple(
        replace(unit, buffers=tuple(replace(buffer, group=next(numbers)) for buffer in unit.buffers))
        for unit in plan.units
    )
    return replace(plan, units=units)
