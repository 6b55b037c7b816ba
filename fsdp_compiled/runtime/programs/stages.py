"""The program after each pass. The last alone is kept: what is between is made again where somebody looks at it.

A step of 96 layers has 15,000 nodes, and some seven passes, of which each would leave a copy behind. Passes are pure:
what they make again is what they made, name for name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_compiled import passes
from fsdp_compiled.capture.ambient import outside_modes
from fsdp_compiled.ir.program import Program
from fsdp_compiled.passes import Pass
from fsdp_compiled.plan.plan import Plan


@dataclass(frozen=True)
class Stages:
    """``first``: those that are there, from the captured program on; ``rest``: the passes that follow on the last."""

    first: tuple[Program, ...]
    rest: tuple[Pass, ...]
    plan: Plan

    def until(self, program: Program) -> tuple[Program, ...]:
        """All of them, from the captured program to this one, which they end in."""
        made: list[Program] = []
        with outside_modes():
            passes.run(self.first[-1], self.plan, self.rest, made.append)
        if made[-1].text() != program.text():
            raise RuntimeError("The passes made another program than they had: one of them is not pure.")
        return (*self.first[:-1], *made[:-1], program)


def transform(captured: Program, plan: Plan, transforms: Sequence[Pass]) -> list[Program]:
    """The captured program, and what the passes made of it; under a memory budget, which may run some of them again,
    what each of them made."""
    if plan.policy.memory_gb is None:
        return [captured, passes.run(captured, plan, transforms)]
    stages: list[Program] = []
    passes.run(captured, plan, transforms, stages.append)
    return stages


def fuse(
    stages: Sequence[Program], plan: Plan, transforms: Sequence[Pass], fusions: Sequence[Pass]
) -> tuple[Program, Stages]:
    """What the fusions make of the last of these stages, and all that led there. ``transforms``: what made them."""
    captured, last = stages[0], stages[-1]
    if plan.policy.memory_gb is not None:
        return passes.run(last, plan, fusions), Stages(tuple(stages), tuple(fusions), plan)
    if fusions:
        last = passes.run(replace(last, donated=last.graph is not captured.graph), plan, fusions)
    return last, Stages((captured,), (*transforms, *fusions), plan)
