"""Steps that were measured, call by call, beside what was predicted of them: `Sharded.profile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.analysis.timeline import Timeline, estimate, measured
from fsdp_compiled.ir.program import Program
from fsdp_compiled.lower.lowering import Runner
from fsdp_compiled.lower.pending_collectives import PendingCollectives
from fsdp_compiled.lower.timed import Timed
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.report.bounds import sentence
from fsdp_compiled.report.changes import milliseconds
from fsdp_compiled.report.chrome_trace import trace
from fsdp_compiled.report.page import spans
from fsdp_compiled.runtime.programs.compile import Compiled


@dataclass
class Profile:
    """``runs``: the calls that were made inside, in order, of this rank, each of a program."""

    plan: Plan
    runs: list[tuple[Compiled, Timeline]] = field(default_factory=list)

    @property
    def compiled(self) -> Compiled | None:
        """The program that updated last, or, where none did, that ran last."""
        every = [compiled for compiled, _ in self.runs]
        return next((one for one in reversed(every) if one.updates), every[-1] if every else None)

    @property
    def steps(self) -> list[Timeline]:
        """The runs of that program."""
        return [time for compiled, time in self.runs if compiled is self.compiled]

    @property
    def step(self) -> Timeline:
        """The one of median length; raises ``RuntimeError`` where none was measured."""
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
    found, before = Profile(plan), [(one, one.runner, one.remainder) for one in programs]
    for compiled in programs:
        timed = Timed(compiled.remainder.code, plan.device)
        compiled.runner, compiled.remainder = _noting(timed, compiled, found), PendingCollectives(timed.code)
    try:
        yield found
        _ = found.step
    finally:
        for compiled, runner, remainder in before:
            compiled.runner, compiled.remainder = runner, remainder


def _noting(timed: Timed, compiled: Compiled, found: Profile) -> Runner:
    nodes = {node.name: node for node in compiled.program.graph.nodes}

    def run(*given: Any) -> Sequence[torch.Tensor]:
        made = timed.runner(*given)
        found.runs.append((compiled, measured(timed.marks(), nodes)))
        return made

    return run
