"""What is counted of two programs, side by side, as rows of text: nodes, collectives with their bytes, peak, time.

                                        gather      recompute
    nodes                                  308            364        +56
    all_gather along shard          4, 4.9 MiB     7, 8.8 MiB         +3, +3.9 MiB
    peak                              31.0 MiB       30.6 MiB       -400.0 KiB

Each side is an entry of ``figures.json``, as `dump` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_compiled.plan.text import human

Number = Callable[[float], str]


def compared(a: Mapping[str, Any], b: Mapping[str, Any], was: str, made: str) -> list[str]:
    """Rows of what differs, with the two names above; one row that says so, where nothing does."""
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


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _pair(a: float | None, b: float | None, text: Number) -> tuple[str, str, str]:
    """Both, and by how much they differ: nothing where they are the same, or one is not known."""
    shown = ["not known" if one is None else text(one) for one in (a, b)]
    if a is None or b is None or a == b:
        return shown[0], shown[1], ""
    return shown[0], shown[1], ("+" if b > a else "-") + text(abs(b - a))
