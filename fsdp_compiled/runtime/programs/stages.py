"""The program after each pass. The last alone is kept: what is between is made again where somebody looks at it.

A step of 96 layers has 15,000 nodes, and some seven passes, of which each would leave a copy behind. Passes are pure:
what they make again is what they made, name for name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_compiled import passes
from fsdp_compiled.capture.global_modes import outside_modes
from fsdp_compiled.ir.node_copies import Kept
from fsdp_compiled.ir.program import Program
from fsdp_compiled.passes import Pass
from fsdp_compiled.plan.plan import Plan


@dataclass(frozen=True)
class Stages:
    """``first``: those that are there, from the captured program on, as far as they are; ``last``: of these the last,
    made again; ``rest``: the passes that follow on it."""

    first: tuple[Program, ...]
    last: Callable[[], Program]
    rest: tuple[Pass, ...]
    plan: Plan

    def until(self, program: Program) -> tuple[Program, ...]:
        """All of them, from the captured program to this one, which they end in."""
        made: list[Program] = []
        with outside_modes():
            passes.run(self.last(), self.plan, self.rest, made.append)
        if made[-1].text() != program.text():
            raise RuntimeError("The passes made another program than they had: one of them is not pure.")
        return (*self.first, *made[:-1], program)


@dataclass(frozen=True)
class Transformed:
    """``captured``: the captured program, made again. ``stages``: what the last of the passes made; under a memory
    budget, which may run some of them again, what each made, after the captured one."""

    captured: Callable[[], Program]
    stages: list[Program]


def transform(captured: Program, plan: Plan, transforms: Sequence[Pass]) -> Transformed:
    """What the passes make of a captured program, whose graph they take."""
    if plan.policy.memory_gb is None:
        kept = Kept(captured)
        made = passes.run(replace(captured, donated=True), plan, transforms, again=kept.program)
        return Transformed(kept.program, [made])
    stages: list[Program] = []
    passes.run(captured, plan, transforms, stages.append)
    return Transformed(lambda: captured, stages)


def fuse(made: Transformed, plan: Plan, transforms: Sequence[Pass], fusions: Sequence[Pass]) -> tuple[Program, Stages]:
    """What the fusions make of the last of these stages, and all that led there. ``transforms``: what made them."""
    last = made.stages[-1]
    if plan.policy.memory_gb is not None:
        known = Stages(tuple(made.stages[:-1]), lambda: last, tuple(fusions), plan)
        return passes.run(last, plan, fusions), known
    if fusions:
        again = lambda: passes.run(made.captured(), plan, transforms)  # noqa: E731
        last = passes.run(replace(last, donated=True), plan, fusions, again=again)
    return last, Stages((), made.captured, (*transforms, *fusions), plan)
