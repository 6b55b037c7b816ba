"""A plan and every stage of a program as files, with what changed from one to the next."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fsdp_compiled.analysis.timeline import estimate
from fsdp_compiled.ir.program import Program
from fsdp_compiled.ir.text import difference, summary
from fsdp_compiled.plan.plan import Plan


def write(folder: str | Path, plan: Plan, stages: Iterable[Program]) -> Path:
    """Writes ``plan.txt``, one numbered text a stage, the differences between neighbours, ``program.txt`` and
    ``timeline.txt``, an estimate of what runs when."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    (root / "plan.txt").write_text(f"{plan}\n")
    before: Program | None = None
    stages = list(stages)
    for index, program in enumerate(stages):
        name = program.history[-1]
        (root / f"{index:02d}-{name}.txt").write_text(program.text() + "\n")
        if before is not None:
            change = "\n".join(difference(before, program))
            (root / f"{index:02d}-{name}.diff").write_text(change + "\n")
        before = program
    (root / "program.txt").write_text(f"{summary(stages[-1])}\n")
    (root / "timeline.txt").write_text(f"{estimate(stages[-1], plan).text()}\n")
    return root
