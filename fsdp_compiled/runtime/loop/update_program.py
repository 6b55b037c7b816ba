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

from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.passes import run, update_alone
from fsdp_compiled.plan.plan import Plan


def update_program(plan: Plan, rules: Sequence[Rule]) -> Program:
    """The program for this plan, whose ``policy.clip`` is the norm to clip at. Gradients are inputs of kind ``sum``."""
    return run(_begin(plan), plan, update_alone(rules))


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


def updated_by(plan: Plan, groups: Sequence[int | None]) -> Plan:
    """The plan, each of whose buffers is updated by the rule of that param group, or by none."""
    numbers = iter(groups)
    units = tuple(
        replace(unit, buffers=tuple(replace(buffer, group=next(numbers)) for buffer in unit.buffers))
        for unit in plan.units
    )
    return replace(plan, units=units)
