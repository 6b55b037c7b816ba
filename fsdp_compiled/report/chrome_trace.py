"""A step in the format of Chrome's and Perfetto's trace viewers, from the columns that `page.spans` makes.

A process for each of what was predicted and what was measured, a thread for each lane; slices are named by units, and
an arrow leads from each collective to where it was waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LANES = ("compute", "gathers", "reductions", "tp", "host")


def trace(sides: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """``sides``: columns of spans by the name of their process, such as ``predicted``."""
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
