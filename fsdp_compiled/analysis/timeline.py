"""A step on a time axis: what the device computes, and what is on the wire meanwhile.

    0 ms                                                      12.4 ms
    network  |root|layers.0|..|layers.1|..........|layers.2|        |
    compute  |....|==embed=|layers.0===|layers.1==|layers.2|========|

`estimate` draws it from a program alone, with the figures of `hardware` and `roofline`. There are two wires, one inside
of nodes and one between them; each serves collectives in the order in which they start. There is one stream of compute,
which stops where it waits for a collective. Collectives along the tp axis have a lane of their own, ``tp``; so have
those along ``replicate`` if its ranks are in other nodes and those of ``shard`` are not. If a step is no CUDA graph,
the host starts one kernel after the other, and no kernel begins before that. `measured` is the same for a real run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from torch import fx

from fsdp_compiled.analysis.roofline import nbytes, seconds_of
from fsdp_compiled.ir.nodes import HOST_COPIES, carried, is_collective, is_wait, owner, role_of, waited_for
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

WAIT = "wait"


@dataclass(frozen=True)
class Span:
    """Something that lasts; times in seconds from the start of the step. ``node``: its node in the program; for a wait,
    the node of the collective."""

    lane: str
    name: str
    start: float
    end: float
    node: str = ""


@dataclass(frozen=True)
class Timeline:
    """``spans``: the lanes, with neighbours of one name joined. ``nodes``: one for each node that takes time, in the
    order in which they run. Waits are in a lane ``wait``, as long as the compute stands still, often not at all."""

    spans: tuple[Span, ...]
    nodes: tuple[Span, ...] = ()

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, lane: str) -> float:
        """Seconds in which something happens in this lane; spans of one lane do not overlap."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane)

    def busy_nodes(self, lane: str) -> float:
        """The same for `nodes`; for `WAIT`, how long communication is exposed."""
        return sum(span.end - span.start for span in self.nodes if span.lane == lane)

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
    """The estimated timeline of the step, on this plan's machine."""
    spans: list[Span] = []
    now = host = 0.0
    launch = 0.0 if plan.graphed else plan.machine.launch
    free: dict[str, float] = {}  # by lane: when its wire is free
    arrives: dict[fx.Node, float] = {}
    times = seconds_of(program.graph, plan.machine, plan.policy.lower == "inductor")
    for node, taken in zip(program.graph.nodes, times, strict=True):
        if node.op != "call_function":
            continue
        role = role_of(node)
        if is_collective(node):
            lane, wires = _lane(str(node.args[-1]), plan)
            host += launch
            start = max(now, host, *(free.get(one, 0.0) for one in wires))
            arrives[node] = start + _transfer(node, plan)
            free.update(dict.fromkeys(wires, arrives[node]))
            spans.append(Span(lane, owner(node) or "loss", start, arrives[node], node.name))
        elif role in HOST_COPIES:
            lane = HOST_COPIES[role]
            start = max(now, free.get(lane, 0.0))
            arrives[node] = free[lane] = start + _copied(node) / plan.machine.host
            spans.append(Span(lane, owner(node) or "loss", start, free[lane], node.name))
        elif role == "part":
            arrives[node] = arrives[node.all_input_nodes[0]]
        elif waits(node):
            begun, now = now, max(now, *(arrives.get(source, now) for source in node.all_input_nodes))
            spans.append(Span(WAIT, owner(node) or "loss", begun, now, waited_for(node).name))
        elif taken:
            host += launch
            now = max(now, host)
            spans.append(Span("compute", owner(node) or "loss", now, now + taken, node.name))
            now += taken
    return Timeline(tuple(_merged(spans)), tuple(spans))


def measured(marks: Sequence[tuple[fx.Node, float, float]], nodes: Mapping[str, fx.Node]) -> Timeline:
    """The timeline of a run in which each call was measured. ``marks``: what was called, when, and until when;
    ``nodes``: the program's, by name. A collective lasts from its start until it was waited for; it had ended by
    then."""
    zero = marks[0][1] if marks else 0.0
    spans: list[Span] = []
    started: dict[str, float] = {}
    for called, begun, ended in marks:
        node, begun, ended = nodes.get(called.name, called), begun - zero, ended - zero
        if is_collective(node):
            started[node.name] = begun
        elif is_wait(node):
            source = waited_for(node)
            if (start := started.pop(source.name, None)) is not None:
                lane = "tp" if source.args[-1] == "tp" else "network"
                spans.append(Span(lane, owner(source) or "loss", start, ended, source.name))
            spans.append(Span(WAIT, owner(node) or "loss", begun, ended, source.name))
        elif piece := called.meta.get("piece"):
            name = Counter(owner(one) for one in piece).most_common(1)[0][0]
            spans.append(Span("compute", name or "loss", begun, ended, called.name))
        elif "phase" in called.meta:
            spans.append(Span("compute", owner(node) or "loss", begun, ended, node.name))
    spans.sort(key=lambda span: span.start)
    return Timeline(tuple(_merged(spans, gap=inf)), tuple(spans))


def waits(node: fx.Node) -> bool:
    """Whether compute stands still there until a collective, or a copy from or to the host, has ended."""
    return is_wait(node) or role_of(node) in ("stored", "restored")


def _lane(axis: str, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """The lane in which collectives along this axis are drawn, and the lanes whose wire they have."""
    inside: dict[str, bool] = {
        name: plan.machine.inside(plan.size(name), plan.stride(name)) for name in ("shard", "replicate", axis)
    }
    lane = "tp" if axis == "tp" else "network"
    if axis == "replicate" and plan.shard > 1 and inside["shard"] and not inside["replicate"]:
        lane = "replicate"
    if plan.machine.inner is None:
        return lane, ("network",)
    return lane, ("inner",) if inside[axis] else ("network",)


def _copied(node: fx.Node) -> int:
    return max((nbytes(source.meta.get("val")) for source in node.all_input_nodes), default=0)


def _transfer(node: fx.Node, plan: Plan) -> float:
    """An all-gather counts what it brings, a reduction what goes in; an all-reduce is a reduction and a gather."""
    return plan.transfer(max(carried(node)), str(node.args[-1]), "all_reduce" in str(node.target))


def _merged(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Joins neighbours of one name in one lane if no more than ``gap`` is between them and nothing is waited for.
    Leaves waits out."""
    found: list[Span] = []
    latest: dict[str, int] = {}
    for span in spans:
        if span.lane == WAIT:
            if span.end > span.start:
                latest.pop("compute", None)
            continue
        index = latest.get(span.lane)
        if index is not None and found[index].name == span.name and span.start - found[index].end <= gap:
            found[index] = Span(span.lane, span.name, found[index].start, span.end)
        else:
            latest[span.lane] = len(found)
            found.append(span)
    return found
