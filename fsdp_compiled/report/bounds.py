"""What bounds a step, in one sentence, with the field of `Policy` that is likely to move it.

Its time is compute, waiting for what is on the wire, and what the host takes to start both; the largest is what bounds
it. The field is a guess from what the policy says and how full the wire is; `simulate` and a second profile tell.
"""

from __future__ import annotations

import torch

from fsdp_compiled.analysis.timeline import WAIT, Timeline
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import human
from fsdp_compiled.report.changes import milliseconds
from fsdp_compiled.report.page import lane_of

FULL = 0.8  # of the time something is on the wire


def sentence(plan: Plan, program: Program, step: Timeline) -> str:
    """Of a step that was measured, or predicted."""
    exposed, compute = step.busy_nodes(WAIT), step.busy_nodes("compute")
    parts = {
        "waiting for": exposed,
        "compute": compute,
        "the host, which starts calls and collectives": step.end - exposed - compute,
    }
    most = max(parts, key=parts.__getitem__)
    share = f"{parts[most] / step.end:.0%} of {milliseconds(step.end)}" if step.end else "nothing"
    if most != "waiting for":
        return f"The step is bound by {most} ({share}); {_for_compute(plan, most)}."
    nodes = {node.name: node for node in program.graph.nodes}
    waited: dict[str, float] = {}
    for span in step.nodes:
        if span.lane == WAIT and span.node in nodes:
            lane = lane_of(nodes[span.node])
            waited[lane] = waited.get(lane, 0.0) + span.end - span.start
    lane = max(waited, key=waited.__getitem__, default="gathers")
    full = _covered(step) > FULL * step.end
    return f"The step is bound by waiting for {lane} ({share}); {_for_wire(plan, lane, full)}."


def _covered(step: Timeline) -> float:
    """Seconds in which something is on the wire; what was measured may overlap."""
    covered, until = 0.0, 0.0
    for span in sorted((one for one in step.nodes if one.lane == "network"), key=lambda one: one.start):
        covered += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return covered


def _for_compute(plan: Plan, what: str) -> str:
    if plan.policy.lower == "eager":
        return 'try Policy(lower="inductor"), which fuses operators and makes fewer calls'
    if what != "compute":
        return "try a larger batch" + (", or Policy(cuda_graph=True)" if plan.device.type == "cuda" else "")
    if plan.device.type == "cuda" and plan.policy.precision.param_dtype is None:
        return "try Policy(precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
    return "communication is hidden, and no field of Policy makes the products fewer"


def _for_wire(plan: Plan, lane: str, full: bool) -> str:
    if lane == "tp":
        return "try fewer ranks along tp"
    if lane == "host":
        return (
            "the link to the host is slower than compute: leave Policy.offload out, or give a larger Policy.memory_gb"
        )
    if not full and lane == "gathers":
        return "the wire is idle in between: try a larger Policy.prefetch, and Policy.limit with it"
    again = sum(buffer.nbytes for buffer in plan.buffers if buffer.unit in plan.resharded)
    if lane == "gathers" and plan.policy.shard == "zero3" and again:
        return f'try Policy(shard="zero2"), which gathers once, if {human(again)} more fit a rank'
    dtypes = {plan.reduce_dtype(b) if lane == "reductions" else plan.compute_dtype(b) for b in plan.buffers}
    if torch.float32 in dtypes and full:
        field = "reduce_dtype" if lane == "reductions" else "param_dtype"
        return f"try Policy(precision=MixedPrecisionPolicy({field}=torch.bfloat16)), which sends half"
    return 'try more rows a rank, or microbatches with Policy(accumulate="full")'
