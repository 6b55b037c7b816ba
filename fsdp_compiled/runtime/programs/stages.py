"""The program after each pass. Only the last is kept: the others are made again when somebody looks at them.

A step of 96 layers has 15,000 nodes and some seven passes, each of which would leave a copy. Passes are pure: running
them again gives the same program, name for name.
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
    """``first``: the kept stages but the last, from the captured program on; ``last``: makes the last kept stage again;
    ``rest``: the passes that follow it."""

    first: tuple[Program, ...]
    last: Callable[[], Program]
    rest: tuple[Pass, ...]
    plan: Plan

    def until(self, program: Program) -> tuple[Program, ...]:
        """All stages from the captured program to this program, which is the last."""
        made: list[Program] = []
        with outside_modes():
            passes.run(self.last(), self.plan, self.rest, made.append)
        if made[-1].text() != program.text():
            raise RuntimeError("The passes made another program than they had: one of them is not pure.")
        return (*self.first, *made[:-1], program)


@dataclass(frozen=True)
class Transformed:
    """``captured``: makes the captured program again. ``stages``: the result of the last pass alone; under a memory
    budget, which may run some passes again, the captured program and the result of each pass."""

    captured: Callable[[], Program]
    stages: list[Program]


def transform(captured: Program, plan: Plan, transforms: Sequence[Pass]) -> Transformed:
    """Runs the passes on a captured program. They consume its graph."""
    if plan.policy.memory_gb is None:
        kept = Kept(captured)
        made = passes.run(replace(captured, donated=True), plan, transforms, again=kept.program)
        return Transformed(kept.program, [made])
    stages: list[Program] = []
    passes.run(captured, plan, transforms, stages.append)
    return Transformed(lambda: captured, stages)


def fuse(made: Transformed, plan: Plan, transforms: Sequence[Pass], fusions: Sequence[Pass]) -> tuple[Program, Stages]:
    """Runs the fusions on the last of these stages. Also returns all stages. ``transforms``: what made them."""
    last = made.stages[-1]
    if plan.policy.memory_gb is not None:
        known = Stages(tuple(made.stages[:-1]), lambda: last, tuple(fusions), plan)
        return passes.run(last, plan, fusions), known
    if fusions:
        again = lambda: passes.run(made.captured(), plan, transforms)  # noqa: E731
        last = passes.run(replace(last, donated=True), plan, fusions, again=again)
    return last, Stages((), made.captured, (*transforms, *fusions), plan)
