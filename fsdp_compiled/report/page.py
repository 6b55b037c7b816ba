"""`report.html`: a step on one page, in one file, which asks nothing of any network.

    headline    step, exposed share, utilisation, peak
    time        compute by unit, gathers and reductions with arrows to their waits, what is exposed in red
    memory      over the same axis, by kind; the ten largest tensors of the peak, with the lines that made them
    units       what each is, takes and sends; which rank holds how much of which parameter
    passes      what each changed

`figures` makes all that is drawn, as plain data. `page` puts it into ``template.html``, with ``report.js`` and uPlot,
which draws axes, areas and zoom (1.6.32 of https://github.com/leeoniya/uPlot; MIT: ``uPlot.LICENSE``). Times are
seconds from the start of the step, sizes bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from fsdp_compiled.analysis.best_effort import attempt
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.analysis.roofline import flops, needed
from fsdp_compiled.analysis.timeline import WAIT, Timeline, waits
from fsdp_compiled.capture.source_lines import user_line
from fsdp_compiled.ir.nodes import carried, describe, is_collective, role_of, waited_for
from fsdp_compiled.ir.program import Program
from fsdp_compiled.ir.text import collective_name
from fsdp_compiled.plan.plan import Plan

LARGEST = 10  # tensors of the peak
LINES = 4000  # of one pass's changes, folded; a page stays small
LANES = ("compute", "gathers", "reductions", "tp", "host")
FILES = ("uPlot.LICENSE", "uPlot.min.css", "report.css", "uPlot.iife.min.js", "report.js")


def page(data: Mapping[str, Any]) -> str:
    """The page that shows what `figures` made."""
    here = Path(__file__).parent
    text = (here / "template.html").read_text("utf-8")
    for name in FILES:
        text = text.replace(f"/* {name} */", (here / name).read_text("utf-8"))
    return text.replace("{data}", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def figures(
    plan: Plan,
    program: Program,
    memory: Memory,
    timeline: Timeline,
    texts: Sequence[tuple[str, str]] = (),
    measured: Timeline | None = None,
) -> dict[str, Any]:
    """What the page shows. ``texts``: names and texts of its tabs. ``measured``: a step of this program that was
    made, drawn above the predicted one."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "call_function"}
    return {
        "title": f"{plan.policy.shard} on {_ranks(plan)}",
        "headline": headline(plan, program, memory, timeline, measured),
        "blocks": {block: unit.name for unit in plan.units for block in unit.members},
        "units": units(plan, timeline, nodes),
        "predicted": spans(timeline, nodes),
        "measured": spans(measured, nodes) if measured is not None else None,
        "memory": heights(memory, timeline, nodes),
        "peak": peak(memory, nodes),
        "holders": holders(plan),
        "texts": [{"name": name, "text": text} for name, text in texts],
    }


def _ranks(plan: Plan) -> str:
    sizes = [f"{size} {axis}" for axis, size in plan.all_axes]
    return " × ".join(sizes) + " ranks" if sizes else "one rank"


def headline(
    plan: Plan, program: Program, memory: Memory, timeline: Timeline, measured: Timeline | None = None
) -> dict[str, Any]:
    """``utilisation``: the share of the machine's rate, as `plan.hardware` has it, that the step's products need. None
    where something is not known."""
    taken = measured or timeline
    nodes, machine = program.graph.nodes, plan.machine
    count = sum(attempt(lambda node=node: flops(node), lambda _: 0) for node in nodes)  # type: ignore[misc]
    busy = sum(attempt(lambda node=node: needed(node, machine), lambda _: 0.0) for node in nodes)  # type: ignore[misc]
    return {
        "seconds": timeline.end,
        "exposed": timeline.busy_nodes(WAIT),
        "flops": count,
        "utilisation": busy / taken.end if taken.end else None,
        "peak": None if memory.unknown else memory.peak.nbytes,
        "between": memory.persistent.total,
        "measured seconds": measured.end if measured is not None else None,
        "measured exposed": measured.busy_nodes(WAIT) if measured is not None else None,
    }


def counts(program: Program) -> dict[str, dict[str, int]]:
    """By the collective's name: how many a program has, and the bytes of the whole that they bring or take."""
    found: dict[str, dict[str, int]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and is_collective(node):
            entry = found.setdefault(f"{collective_name(node)} along {node.args[-1]}", {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] += max(carried(node))
    return found


def lane_of(node: fx.Node) -> str:
    """The lane in which a collective, or a copy from or to the host, is drawn."""
    if not is_collective(node):
        return "host"
    if node.args[-1] == "tp":
        return "tp"
    return "gathers" if role_of(node) == "gather" or "all_gather" in str(node.target) else "reductions"


def spans(timeline: Timeline, nodes: Mapping[str, fx.Node]) -> dict[str, list[Any]]:
    """Columns: compute by unit, and each collective by itself, with what a rank gives and gets of it. ``wait``: from
    when and until when its result was waited for."""
    waited = {span.node: (span.start, span.end) for span in timeline.nodes if span.lane == WAIT}
    rows: list[tuple[Any, ...]] = [
        (span.start, span.end, "compute", span.name, "", None, None)
        for span in timeline.spans
        if span.lane == "compute"
    ]
    for span in timeline.nodes:
        if span.lane not in ("compute", WAIT):
            given, got = carried(nodes[span.node])
            size = [given, got]
            rows.append(
                (span.start, span.end, lane_of(nodes[span.node]), span.name, span.node, size, waited.get(span.node))
            )
    columns = ("start", "end", "lane", "unit", "node", "bytes", "wait")
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


def trace(sides: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """A trace for Chrome's and Perfetto's viewers. ``sides``: columns of `spans` by the name of their process, such as
    ``predicted``. Each process has a thread for each lane. Slices are named by units, and an arrow leads from each
    collective to where it was waited for."""
    events = [one for number, (name, columns) in enumerate(sides.items(), 1) for one in _events(number, name, columns)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(process: int, name: str, columns: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for lane in LANES:
        thread = {"pid": process, "tid": LANES.index(lane) + 1}
        yield {"ph": "M", **thread, "name": "thread_name", "args": {"name": lane}}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    for count, row in enumerate(rows):
        thread = {"pid": process, "tid": LANES.index(row["lane"]) + 1}
        args = {"node": row["node"], "bytes": row["bytes"]} if row["node"] else {}
        lasts = _times(row["start"], row["end"])
        yield {"ph": "X", **thread, "cat": row["lane"], "name": row["unit"], **lasts, "args": args}
        if row["wait"] is not None:
            start, end = row["wait"]
            compute = {"pid": process, "tid": 1}
            waits = {"cat": "exposed", "name": f"waits for {row['node']}", **_times(start, end)}
            yield from [{"ph": "X", **compute, **waits, "args": {"unit": row["unit"]}}] * (end > start)
            arrow = {"id": process << 32 | count, "cat": "wait", "name": row["node"]}
            yield {"ph": "s", **thread, **arrow, "ts": row["start"] * 1e6}
            yield {"ph": "f", **compute, **arrow, "ts": start * 1e6}


def _times(start: float, end: float) -> dict[str, float]:
    return {"ts": start * 1e6, "dur": (end - start) * 1e6}


def starts(timeline: Timeline, nodes: Iterable[fx.Node]) -> list[float]:
    """When each node is reached. A node that takes no time is reached when all before it are done."""
    found, now = [], 0.0
    ahead = list(reversed(timeline.nodes))
    for node in nodes:
        start = now
        if ahead and ahead[-1].node == (waited_for(node) if waits(node) else node).name:
            span = ahead.pop()
            if span.lane in ("compute", WAIT):
                start, now = span.start, span.end
        found.append(start)
    return found


def heights(memory: Memory, timeline: Timeline, nodes: Mapping[str, fx.Node]) -> dict[str, Any]:
    """Bytes alive over the step: at ``times``, by kind, without moments that change nothing."""
    moments = memory.timeline
    changes: dict[str, list[int]] = {}
    for storage in memory.storages:
        if storage.kind != "kernel":
            row = changes.setdefault(storage.kind, [0] * (len(moments) + 1))
            row[storage.begin] += storage.nbytes
            row[storage.end] -= storage.nbytes
    kinds = {"state": [memory.persistent.total] * len(moments), "batch": [memory.batch] * len(moments)}
    for kind, row in changes.items():
        alive = 0
        kinds[kind] = [alive := alive + change for change in row[:-1]]
    if moments:
        kinds["kernel"] = [moment.nbytes - sum(column) for moment, column in zip(moments, zip(*kinds.values()))]
    times = starts(timeline, [nodes[moment.node] for moment in moments])
    kept = [
        place
        for place in range(len(moments))
        if not place or place == len(moments) - 1
        or any(row[place] != row[place - 1] for row in kinds.values())
    ]  # fmt: skip
    return {
        "times": [times[place] for place in kept],
        "kinds": {kind: [row[place] for place in kept] for kind, row in kinds.items() if any(row)},
        "nodes": [moments[place].node for place in kept],
        "where": [moments[place].where for place in kept],
    }


def peak(memory: Memory, nodes: Mapping[str, fx.Node]) -> dict[str, Any] | None:
    """The moment at which the most bytes are alive, and the largest tensors of these, with the lines of the user's code
    that they come from."""
    if memory.unknown or not memory.timeline:
        return None
    highest = memory.peak
    place = next(place for place, moment in enumerate(memory.timeline) if moment is highest)
    alive = sorted((one for one in memory.storages if one.begin <= place < one.end), key=lambda one: -one.nbytes)
    return {
        "node": highest.node,
        "phase": highest.phase,
        "where": highest.where,
        "bytes": highest.nbytes,
        "by kind": memory.at_peak(),
        "tensors": [
            {
                "node": one.node, "kind": one.kind, "where": one.where, "bytes": one.nbytes,
                "shape": describe(nodes[one.node]) if one.node in nodes else "",
                "line": source_line(nodes[one.node]) if one.node in nodes else "",
            }
            for one in alive[:LARGEST]
        ],
    }  # fmt: skip


def source_line(node: fx.Node) -> str:
    """``model.py:31, in forward: x = self.up(x)``; empty for what passes inserted."""
    trace = node.meta.get("stack_trace")
    return _line(trace) if trace else ""


@cache
def _line(trace: str) -> str:
    found = re.search(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', user_line(RuntimeError(trace)))
    return f"{Path(found[1]).name}:{found[2]}, in {found[3]}: {found[4].strip()}" if found else ""


def units(plan: Plan, timeline: Timeline, nodes: Mapping[str, fx.Node]) -> list[dict[str, Any]]:
    """A row for each unit, in the plan's order: what it is, what is sent for it, and the seconds of both."""
    blocks = {block: unit.name for unit in plan.units for block in unit.members}
    rows: dict[str, dict[str, Any]] = {}
    for unit in plan.units:
        rows[unit.name] = {
            "unit": unit.name,
            "parameters": sum(len(buffer.slots) for buffer in unit.buffers),
            "gathered": sum(buffer.nbytes for buffer in unit.buffers),
            "held": sum(plan.shard_numel(buffer) * buffer.dtype.itemsize for buffer in unit.buffers),
            **dict.fromkeys(("compute", "gathers", "reductions", "tp", "host", "exposed"), 0.0),
        }  # fmt: skip
    rest = next(iter(rows), "")
    for span in timeline.nodes:
        row = rows.get(blocks.get(span.name, span.name)) or rows.get(rest)
        if row is not None:
            lane = (
                span.lane if span.lane == "compute" else "exposed" if span.lane == WAIT else lane_of(nodes[span.node])
            )
            row[lane] += span.end - span.start
    return list(rows.values())


def holders(plan: Plan) -> dict[str, Any]:
    """The data for a map of ranks and parameters: where each parameter lies in its flat buffer. A rank along the shard
    axis owns the slice of ``each`` elements at its place. By rows, a rank owns rows of each parameter."""
    return {
        "ranks": plan.shard,
        "replicas": plan.replicate,
        "tp": plan.tp,
        "sharded": bool(plan.placement.parameter),
        "buffers": [
            {
                "unit": buffer.unit, "by rows": buffer.by_rows, "each": plan.shard_numel(buffer), "lies": buffer.lies,
                "slots": [
                    [slot.name, slot.offset, slot.leaf.numel, slot.leaf.shape[0] if slot.leaf.shape else 1]
                    for slot in buffer.slots
                ],
            }
            for buffer in plan.buffers
        ],
    }  # fmt: skip
