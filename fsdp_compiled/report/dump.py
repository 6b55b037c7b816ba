"""A plan and every stage of a program as files, with what changed from one to the next, and a page to look at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from fsdp_compiled.analysis.best_effort import attempt
from fsdp_compiled.analysis.memory import Memory, unpredicted
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.analysis.timeline import WAIT, Timeline, estimate
from fsdp_compiled.ir.program import Program
from fsdp_compiled.ir.text import difference, summary
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import describe, folded, human, milliseconds
from fsdp_compiled.report.page import LINES, counts, figures, page, spans, trace


def write(
    folder: str | Path,
    plan: Plan,
    stages: Sequence[Program],
    memory: Memory | None = None,
    lowered: str = "",
    measured: Timeline | None = None,
) -> Path:
    """Writes ``plan.txt``; one numbered text for each stage, and the differences between neighbours; ``program.txt``;
    ``timeline.txt``, an estimate of what runs when; ``memory.txt``; ``lowered.txt``, what the program became;
    ``figures.json``, what is counted of each stage; ``trace.json``, for Perfetto; and ``report.html``, a page that
    shows all of it. The last two have what was ``measured``, if anything was.

    Raises ``ValueError`` where the folder cannot be made or written. A text that cannot be made says why in its file.
    """
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name, text in _texts(plan, stages, memory, lowered, measured):
            made = attempt(text, lambda why, name=name: f"{name} could not be told: {why}")  # type: ignore[misc]
            (root / name).write_text(f"{made}\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"dump cannot write to {root}: {error.strerror or error}. Give a folder that this process may make and "
            "write to."
        ) from error
    return root


def _texts(
    plan: Plan, stages: Sequence[Program], memory: Memory | None, lowered: str, measured: Timeline | None
) -> Iterator[tuple[str, Callable[[], str]]]:
    """The files' names, each with the function that makes its text."""
    last, made_by = stages[-1], [program.history[-1] for program in stages]
    texts = [cache(program.text) for program in stages]
    time = cache(lambda: estimate(last, plan))
    counted = cache(lambda: _counted(plan, stages, memory, time()))
    yield "plan.txt", lambda: "\n".join(describe(plan))
    for index, name in enumerate(made_by):
        yield f"{index:02d}-{name}.txt", texts[index]
        if index:
            yield f"{index:02d}-{name}.diff", partial(_changed, texts[index - 1 : index + 1], made_by[index - 1 :])
    yield "program.txt", lambda: summary(last)
    yield "timeline.txt", lambda: time().text()
    if memory is not None:
        yield "memory.txt", memory.text
    if lowered:
        yield "lowered.txt", lambda: lowered
    yield "figures.json", lambda: json.dumps(counted(), indent=1)
    nodes = {node.name: node for node in last.graph.nodes}

    def traced() -> str:
        sides = {"predicted": time()} | ({"measured": measured} if measured is not None else {})
        return trace({name: spans(side, nodes) for name, side in sides.items()})

    yield "trace.json", traced
    if memory is not None:
        tabs: list[tuple[str, Callable[[], str]]]
        tabs = [("program", last.__str__), ("plan", plan.__str__), ("memory", memory.text)]
        tabs += [("lowered", partial(folded, lowered))] * bool(lowered)
        every = lambda: [*((name, text()) for name, text in tabs), *_passes(made_by, texts, counted())]  # noqa: E731
        yield "report.html", lambda: page(figures(plan, last, memory, time(), every(), measured))


def _counted(plan: Plan, stages: Sequence[Program], memory: Memory | None, time: Timeline) -> dict[str, Any]:
    """For each stage: its nodes, its collectives with their bytes, and its peak; for the last its time, too."""
    found: dict[str, Any] = {}
    for program in stages:
        known = memory
        if memory is not None and not memory.unknown and program is not stages[-1]:
            known = attempt(partial(predict, program, plan, memory.persistent), unpredicted)
        found[program.history[-1]] = {
            "nodes": len(program.graph.nodes),
            "collectives": counts(program),
            "peak bytes": None if known is None or known.unknown else known.peak.nbytes,
        }
    found[stages[-1].history[-1]] |= {"seconds": time.end, "exposed seconds": time.busy_nodes(WAIT)}
    return found


def _passes(
    made_by: Sequence[str], texts: Sequence[Callable[[], str]], counted: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What each pass changed, by counts and then by lines, and the text at the end; folded."""
    small = cache(folded)  # a pass that has nothing to do leaves the text as it was
    for index in range(1, len(made_by)):
        before, name = made_by[index - 1 : index + 1]
        changed = difference(small(texts[index - 1]()), small(texts[index]()), before, name)
        lines = changed.split("\n") if changed else ["nothing is changed"]
        if len(lines) > LINES:
            lines = [*lines[:LINES], f"... and {len(lines) - LINES} lines more, in {index:02d}-{name}.diff"]
        yield name, "\n".join([*compared(counted[before], counted[name], before, name), "", *lines])
    yield "what runs", small(texts[-1]())


def _changed(texts: Sequence[Callable[[], str]], made_by: Sequence[str]) -> str:
    return difference(texts[0](), texts[1](), made_by[0], made_by[1])


def compared(a: Mapping[str, Any], b: Mapping[str, Any], was: str, made: str) -> list[str]:
    """The counts of two programs, entries of ``figures.json``: rows of what differs, under the two names; or one row
    that says that nothing differs.

                                            gather      recompute
        nodes                                  308            364        +56
        all_gather along shard          4, 4.9 MiB     7, 8.8 MiB         +3, +3.9 MiB
        peak                              31.0 MiB       30.6 MiB       -400.0 KiB
    """
    rows = [("nodes", *_pair(a.get("nodes"), b.get("nodes"), str))]
    sent, sends = a.get("collectives", {}), b.get("collectives", {})
    nothing = {"count": 0, "bytes": 0}
    for name in sorted({*sent, *sends}):
        one, other = sent.get(name, nothing), sends.get(name, nothing)
        number = _pair(one["count"], other["count"], str)
        size = _pair(one["bytes"], other["bytes"], human)
        joined = [", ".join(filter(None, both)) for both in zip(number, size, strict=True)]
        rows.append((name, *joined))
    rows += [
        ("peak", *_pair(a.get("peak bytes"), b.get("peak bytes"), human)),
        ("step, estimated", *_pair(a.get("seconds"), b.get("seconds"), milliseconds)),
        ("exposed, estimated", *_pair(a.get("exposed seconds"), b.get("exposed seconds"), milliseconds)),
    ]
    rows = [row for row in rows if row[3]]
    if not rows:
        return ["counts, bytes and peak are the same"]
    wide = [max(len(row[column]) for row in [("", was, made, ""), *rows]) for column in range(4)]
    head = f"{'':{wide[0]}}  {was:>{wide[1]}}  {made:>{wide[2]}}"
    return [head, *(f"{n:{wide[0]}}  {x:>{wide[1]}}  {y:>{wide[2]}}  {d:>{wide[3]}}" for n, x, y, d in rows)]


def _pair(a: float | None, b: float | None, text: Callable[[float], str]) -> tuple[str, str, str]:
    """Both values, and their difference: nothing if they are the same, or if one is not known."""
    shown = ["not known" if one is None else text(one) for one in (a, b)]
    if a is None or b is None or a == b:
        return shown[0], shown[1], ""
    return shown[0], shown[1], ("+" if b > a else "-") + text(abs(b - a))
