"""A plan and every stage of a program as files, with what changed from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from fsdp_compiled.analysis.contained import attempt
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.analysis.timeline import estimate
from fsdp_compiled.ir.program import Program
from fsdp_compiled.ir.text import difference, summary
from fsdp_compiled.plan.plan import Plan


def write(
    folder: str | Path, plan: Plan, stages: Sequence[Program], memory: Memory | None = None, lowered: str = ""
) -> Path:
    """Writes ``plan.txt``, one numbered text a stage, the differences between neighbours, ``program.txt``,
    ``timeline.txt``, an estimate of what runs when, ``memory.txt``, and ``lowered.txt``: what the program became.

    Raises ``ValueError`` where the folder cannot be made or written. A text that cannot be made says why in its file.
    """
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name, text in _texts(plan, stages, memory, lowered):
            made = attempt(text, lambda why, name=name: f"{name} could not be told: {why}")  # type: ignore[misc]
            (root / name).write_text(f"{made}\n")
    except OSError as error:
        raise ValueError(
            f"dump cannot write to {root}: {error.strerror or error}. Give a folder that this process may make and "
            "write to."
        ) from error
    return root


def _texts(
    plan: Plan, stages: Sequence[Program], memory: Memory | None, lowered: str
) -> Iterator[tuple[str, Callable[[], str]]]:
    """The files' names, and what makes their texts."""
    last, made_by = stages[-1], [program.history[-1] for program in stages]
    texts = [cache(program.text) for program in stages]
    yield "plan.txt", lambda: str(plan)
    for index, name in enumerate(made_by):
        yield f"{index:02d}-{name}.txt", texts[index]
        if index:
            yield f"{index:02d}-{name}.diff", partial(_changed, texts[index - 1 : index + 1], made_by[index - 1 :])
    yield "program.txt", lambda: summary(last)
    yield "timeline.txt", lambda: estimate(last, plan).text()
    if memory is not None:
        yield "memory.txt", memory.text
    if lowered:
        yield "lowered.txt", lambda: lowered


def _changed(texts: Sequence[Callable[[], str]], made_by: Sequence[str]) -> str:
    return difference(texts[0](), texts[1](), made_by[0], made_by[1])
