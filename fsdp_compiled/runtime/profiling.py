"""Measures steps, call by call, beside their prediction: `Sharded.profile`.

While a step is profiled, the program's code runs with a clock around each call. In ``torch.profiler`` each
call has a name, too: its unit and its node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from fsdp_compiled.analysis.timeline import WAIT, Timeline, estimate, measured
from fsdp_compiled.ir.program import Program
from fsdp_compiled.ir.text import where
from fsdp_compiled.lower.lowering import Runner
from fsdp_compiled.lower.pending_collectives import PendingCollectives
from fsdp_compiled.lower.program_code import Code, function_for
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import human, milliseconds
from fsdp_compiled.report.page import lane_of, spans, trace
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.simulate import this_cpu

Mark = tuple[fx.Node, float, float]  # what was called, when, and until when, in seconds


def _clocked(compiled: Compiled, device: torch.device, found: Profile) -> tuple[Runner, PendingCollectives]:
    """What runs the program with a clock around each call. On a GPU, events on its own stream measure, so a wait is as
    long as that stream stands still."""
    code, nodes = compiled.pending.code, {node.name: node for node in compiled.program.graph.nodes}
    now: Callable[[], Any] = _event if device.type == "cuda" else time.perf_counter
    noted: list[tuple[fx.Node, Any, Any]] = []

    @cache
    def call(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any]]:
        target, args = code.call(node)
        function, label = function_for(target, args, node.kwargs), f"{where(node)}: {node.name}"

        def clocked(*given: Any, **named: Any) -> Any:
            begun = now()
            with record_function(label):
                made = function(*given, **named)
            noted.append((node, begun, now()))
            return made

        return clocked, args

    timed = Code(code.graph, call).run

    def run(*given: Any) -> Sequence[torch.Tensor]:
        noted.clear()
        made = timed(*given)
        found.runs.append((compiled, measured(_marks(noted), nodes)))
        return made

    return run, PendingCollectives(timed)


def _marks(noted: Sequence[tuple[fx.Node, Any, Any]]) -> list[Mark]:
    if not noted or isinstance(first := noted[0][1], float):
        return list(noted)
    torch.cuda.synchronize()
    return [(node, *(first.elapsed_time(one) / 1e3 for one in both)) for node, *both in noted]  # type: ignore[misc]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


FULL = 0.8  # above this fraction of a step, the wire counts as full


@dataclass
class Profile:
    """``runs``: this rank's calls inside the block, in order, each with its program. ``plan``: on a CPU, predictions by
    it are this host's (`this_cpu`)."""

    plan: Plan
    runs: list[tuple[Compiled, Timeline]] = field(default_factory=list)

    @property
    def compiled(self) -> Compiled | None:
        """The last program that made an update; if none did, the last that ran."""
        every = [compiled for compiled, _ in self.runs]
        return next((one for one in reversed(every) if one.updates), every[-1] if every else None)

    @property
    def steps(self) -> list[Timeline]:
        """The runs of that program."""
        return [time for compiled, time in self.runs if compiled is self.compiled]

    @property
    def step(self) -> Timeline:
        """The step of median length; raises ``RuntimeError`` if none was measured."""
        if not self.steps:
            raise RuntimeError(
                "Nothing was measured: no program that was compiled before the block ran inside it. Make a step before "
                "`with sharded.profile():`, and a few of the same shapes inside."
            )
        return sorted(self.steps, key=lambda one: one.end)[len(self.steps) // 2]

    def trace(self, path: str | Path) -> None:
        """Writes prediction and measurement for chrome://tracing and ui.perfetto.dev."""
        step, program = self.step, self._program
        nodes = {node.name: node for node in program.graph.nodes}
        sides = {"predicted": estimate(program, self.plan), "measured": step}
        Path(path).write_text(trace({name: spans(one, nodes) for name, one in sides.items()}), encoding="utf-8")

    @property
    def _program(self) -> Program:
        assert self.compiled is not None
        return self.compiled.program

    def __str__(self) -> str:
        if not self.steps:
            return "nothing was measured"
        program = self._program
        predicted, said = estimate(program, self.plan).end, sentence(self.plan, program, self.step)
        count = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        return f"{said} ({count} measured; predicted: {milliseconds(predicted)})"

    __repr__ = __str__  # what a prompt shows


@contextmanager
def profiling(plan: Plan, programs: Sequence[Compiled]) -> Iterator[Profile]:
    """Inside, these programs run with a clock around each call, and without CUDA graphs."""
    if plan.device.type == "cpu":
        plan = replace(plan, machine=this_cpu(plan))
    found, before = Profile(plan), [(one, one.runner, one.pending) for one in programs]
    for compiled in programs:
        compiled.runner, compiled.pending = _clocked(compiled, plan.device, found)
    try:
        yield found
        _ = found.step
    finally:
        for compiled, runner, pending in before:
            compiled.runner, compiled.pending = runner, pending


def sentence(plan: Plan, program: Program, step: Timeline) -> str:
    """Says what bounds a measured or predicted step, and which field of `Policy` is likely to make it faster.

    A step's time is compute, waiting for communication, and the host's time to start both. The largest of these bounds
    the step. The field is a guess from the policy and from how full the wire is; `simulate` and a second profile tell.
    """
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
    """Seconds in which something is on the wire, counted once where measured spans overlap."""
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
    node = plan.machine.node // plan.tp
    if lane == "gathers" and again and not plan.neighbours and 1 < node < plan.shard and plan.shard % node == 0:
        return f"try Policy(reshard_onto={node}), whose second gathers stay in a node"
    if lane == "gathers" and plan.policy.shard == "zero3" and again:
        return f'try Policy(shard="zero2"), which gathers once, if {human(again)} more fit a rank'
    dtypes = {plan.reduce_dtype(b) if lane == "reductions" else plan.compute_dtype(b) for b in plan.buffers}
    if torch.float32 in dtypes and full:
        field = "reduce_dtype" if lane == "reductions" else "param_dtype"
        return f"try Policy(precision=MixedPrecisionPolicy({field}=torch.bfloat16)), which sends half"
    return 'try more rows a rank, or microbatches with Policy(accumulate="full")'
