"""A step on a time axis: what the device computes, and what is on the wire meanwhile.

    0 ms                                                      12.4 ms
    network  |root|layers.0|..|layers.1|..........|layers.2|        |
    compute  |....|==embed=|layers.0===|layers.1==|layers.2|========|

`estimate` draws it from a program alone, with the rough figures of `hardware` and `roofline`: one wire, which serves
collectives in the order in which they start, and one stream of compute, which stops where it waits for one. Collectives
along the tp axis have a lane of their own, ``tp``, and a wire of their own where the machine has one
(`Machine.inner`). Spans that were measured can be drawn in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fsdp_compiled.analysis.roofline import seconds
from fsdp_compiled.ir.nodes import carried, is_collective, is_wait, owner, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan


@dataclass(frozen=True)
class Span:
    """Something that lasts; times in seconds from the start of the step."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, lane: str) -> float:
        """Seconds in which something happens in this lane; spans of one lane do not overlap."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane)

    def text(self, width: int = 100) -> str:
        """The lanes as rows of ``width`` characters, each span with as much of its name as fits."""
        scale = width / self.end if self.end else 0.0
        lanes = list(dict.fromkeys(span.lane for span in self.spans))
        label = max(map(len, lanes), default=0) + 2
        total = sum(map(self.busy, lanes))
        rows = [
            f"{'':{label}}0 ms{f'{self.end * 1e3:.4g} ms':>{width - 2}}",
            *(f"{lane:{label}}|{_row((s for s in self.spans if s.lane == lane), scale, width)}|" for lane in lanes),
        ]
        parts = ", ".join(f"{lane} {self.busy(lane) * 1e3:.4g} ms" for lane in lanes)
        saved = 100 * (1 - self.end / total) if total else 0.0
        return "\n".join([*rows, f"{parts}; {saved:.0f}% less than one after the other"])


def _row(spans: Iterable[Span], scale: float, width: int) -> str:
    row = ["."] * width
    for span in spans:
        first, last = round(span.start * scale), round(span.end * scale)
        size = max(last, first + 1) - first
        text = (span.name[: size - 1] + "=" * size)[: size - 1] + "|" if size > 1 else "|"
        row[first : first + size] = text
    return "".join(row[:width])


def estimate(program: Program, plan: Plan) -> Timeline:
    """What the step is thought to take, on this plan's machine."""
    spans: list[Span] = []
    now = 0.0
    free: dict[str, float] = {}  # by wire, when it is
    arrives: dict[fx.Node, float] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if is_collective(node):
            lane = "tp" if node.args[-1] == "tp" else "network"
            wire = lane if plan.machine.inner is not None else "network"
            start = max(now, free.get(wire, 0.0))
            arrives[node] = free[wire] = start + _transfer(node, plan)
            spans.append(Span(lane, owner(node) or "loss", start, free[wire]))
        elif role_of(node) == "part":
            arrives[node] = arrives[node.all_input_nodes[0]]
        elif is_wait(node):
            now = max(now, arrives.get(node.all_input_nodes[0], now))
        elif taken := seconds(node, plan.machine):
            spans.append(Span("compute", owner(node) or "loss", now, now + taken))
            now += taken
    return Timeline(tuple(_merged(spans)))


def _transfer(node: fx.Node, plan: Plan) -> float:
    """An all-gather by what it brings, a reduction by what goes in; an all-reduce is a reduction and a gather."""
    axis = str(node.args[-1])
    times = 2 if "all_reduce" in str(node.target) else 1
    return times * plan.machine.transfer(max(carried(node)), plan.size(axis), axis)


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of one name in one lane as one."""
    found: list[Span] = []
    latest: dict[str, int] = {}
    for span in spans:
        index = latest.get(span.lane)
        if index is not None and found[index].name == span.name and found[index].end == span.start:
            found[index] = Span(span.lane, span.name, found[index].start, span.end)
        else:
            latest[span.lane] = len(found)
            found.append(span)
    return found
