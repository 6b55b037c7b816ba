"""Hides communication under compute: gathers start early, reductions are waited for late.

    before                             after, prefetch=1

    a = all_gather(a_shard)            a = all_gather(a_shard)
    wait(a); use(a)                    b = all_gather(b_shard)     # on the wire while a is used
    b = all_gather(b_shard)            wait(a); use(a)
    wait(b); use(b)                    wait(b); use(b)

Units are used in a sequence (forward, then backward in reverse). A gather moves to just before the use that stands
``prefetch`` places before its own in that sequence; its wait stays at the first use. It does not move

- out of its phase: what backward gathers first starts when backward does,
- ahead of another gather, so that the wire serves them in the order in which they are needed,
- to where more than ``limit`` units would be alive, or a unit alive twice.

The first ``prefetch + 1`` gathers start with the program: nothing can hide the first. A reduction starts when the last
of its gradients exists, where `reduce` put it. Its wait moves down until ``prefetch`` reductions are on the wire with
it, never further, because the flat gradient lives until then. Only these few nodes move: the order of compute, and with
it the memory of activations, is the model's own.

On CPUs, ``prefetch="auto"`` costs no memory: a gather starts early, and a reduction is waited for late, only as far as
that leaves the predicted peak where it is with neither (`Headroom`). There ranks share their cores with the
communication, so that little is hidden, and gloo copies what it gathers: data on the wire is in memory twice.

Parameters of buffers by rows are copied out of the gathered buffer, and need it no longer after the copy. So the gather
that would start before that use starts behind the copy, and two units are not gathered at once. In a unit of several
blocks, that is the last block's copy; there, reductions that started before the unit are waited for, too.
"""

from __future__ import annotations

from itertools import accumulate

from torch import fx

from fsdp_compiled.analysis.kernel_workspace import backend_of, on_wire
from fsdp_compiled.analysis.peak_memory import Headroom
from fsdp_compiled.analysis.roofline import nbytes, seconds_of
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.liveness import LiveRange, live_ranges, most_gathered
from fsdp_compiled.ir.nodes import Phase, calls, is_collective, positions, purpose_of, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.aten_operators import join_rows, split_rows
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.policy import MOST_AHEAD

WORTH = 0.05  # what one more unit ahead must hide in addition, as a part of the time on the wire

Entry = tuple[int, fx.Node, LiveRange]  # place in the program, node to start before, live range used from there on


def schedule(program: Program, plan: Plan) -> Program:
    """Moves gathers up and the waits of reductions down; nothing is added or taken away."""
    if not any(role_of(node) in ("gather", "reduce") for node in calls(program.graph, is_collective)):
        return program.after("schedule")
    edit = Edit(program)
    found = live_ranges(edit.graph)
    ahead, reason = _prefetch(edit.graph, found, plan)
    most = plan.policy.limit if isinstance(plan.policy.limit, int) else None
    notes = [reason]
    room = None
    if plan.policy.prefetch == "auto" and plan.device.type == "cpu":
        _wait_at_once(edit)
        found = live_ranges(edit.graph)
        room = Headroom(edit.done("schedule"), plan)
        notes = [f"{reason}; gathers start only as early as the peak allows" if reason else ""]
    for live_range, target in _starts(edit.graph, found, ahead, most, plan, room):
        edit.move(live_range.issue, before=target)
    _wait_late(edit, max(ahead, 1), plan, room)
    if found:
        peak = most_gathered(live_ranges(edit.graph))
        given = f"{most}, as given" if most is not None else f"{peak} (auto): what that comes to"
        notes.append(f"limit={given}; at most {peak} units alive at once")
    return edit.done("schedule", *(note for note in notes if note))


def _sequence(graph: fx.Graph, found: list[LiveRange]) -> list[Entry]:
    """Where the use of each live range begins, in each phase; before its wait, if the wait comes first."""
    order = positions(graph)
    entries: list[Entry] = []
    for live_range in found:
        waits = [node for node in live_range.aliases if role_of(node) == "wait"]
        opening = min([*waits, *live_range.uses], key=order.__getitem__, default=None)
        if opening is None or opening.op != "call_function":
            continue
        entries.append((order[opening], opening, live_range))
        later = live_range.first_use("backward") if opening.meta["phase"] == "forward" else None
        if later is not None:
            entries.append((order[later], later, live_range))
    return sorted(entries, key=lambda entry: entry[0])


def _places(entries: list[Entry]) -> dict[int, int]:
    """Maps each live range's identity to its first entry's place."""
    return {id(entry[2]): index for index, entry in reversed(list(enumerate(entries)))}


def _starts(
    graph: fx.Graph, found: list[LiveRange], ahead: int, most: int | None, plan: Plan, room: Headroom | None
) -> list[tuple[LiveRange, fx.Node]]:
    """Where each gather is to start: the node to move it before."""
    if ahead == 0:
        return []
    nodes = list(graph.nodes)
    order = positions(graph)
    begins = {node.meta.get("phase"): order[node] for node in reversed(nodes)}
    entries = _sequence(graph, found)
    places = _places(entries)
    moved: list[tuple[LiveRange, fx.Node]] = []
    leaving: set[fx.Node] = set()  # nodes that are moved, and so no longer stand where they did
    placed: list[LiveRange] = []
    previous = 0
    for live_range in found:
        place = places.get(id(live_range))
        issue = live_range.issue
        now = min(order[node] for node in issue)
        earliest = begins[issue[0].meta["phase"]]
        if place is not None:
            at = max(_behind_copies(entries[place - ahead], order) if place >= ahead else earliest, earliest, previous)
            at = _room(at, live_range.unit, placed, most)
            if room is not None and at < now:
                taken = _while_sent(issue, plan)
                at = room.earliest(nodes, at, now, taken)
                room.take(nodes[at:now], taken)
            while at < now and nodes[at] in leaving:
                at += 1
            if at < now:
                if room is not None:
                    room.stand(issue, nodes[at])
                moved.append((live_range, nodes[at]))
                leaving |= set(issue)
                live_range.start = previous = at
            else:
                previous = live_range.start + 1
        placed.append(live_range)
    return moved


def _while_sent(issue: list[fx.Node], plan: Plan) -> int:
    """Bytes that are alive while a unit is gathered: its buffers, and what the wire and casts need besides."""
    made = [node for node in issue if role_of(node) in ("cast", "pack", "gather")]
    return sum(nbytes(node.meta["val"]) + on_wire(node, backend_of(plan.device)) for node in made)


def _copies(live_range: LiveRange, phase: Phase) -> list[fx.Node]:
    """What copies parameters out of the gathered buffer in this phase."""
    return [node for node in live_range.aliases if node.target is split_rows and node.meta["phase"] == phase]


def _behind_copies(entry: Entry, order: dict[fx.Node, int]) -> int:
    """The place where this use begins; if it copies parameters, the place behind the last copy."""
    place, opening, live_range = entry
    return max([place, *(order[node] + 1 for node in _copies(live_range, opening.meta["phase"]))])


def _room(at: int, unit: str, placed: list[LiveRange], most: int | None) -> int:
    """The first place from ``at`` on where the unit is not alive already and fewer than ``most`` others are."""
    while True:
        busy = [live_range for live_range in placed if live_range.stop >= at]
        same = [live_range.stop for live_range in busy if live_range.unit == unit]
        if same:
            at = max(same) + 1
        elif most is not None and len({live_range.unit for live_range in busy}) >= most:
            at = min(live_range.stop for live_range in busy) + 1
        else:
            return at


def _starts_a_reduction(node: fx.Node) -> bool:
    """Whether the node starts a reduction; the gather of an exchange's sums belongs to the exchange's tail instead."""
    return role_of(node) == "reduce" and purpose_of(node) != "gather"


def _wait_at_once(edit: Edit) -> None:
    """Moves each reduction's wait, and the nodes that follow from it, to just behind the reduction's start."""
    order = positions(edit.graph)
    for start in [node for node in edit.graph.nodes if _starts_a_reduction(node)]:
        tail = _tail(start, order)
        behind = start.next
        while behind in tail:
            behind = behind.next
        edit.move(tail, before=behind)


def _wait_late(edit: Edit, in_flight: int, plan: Plan, room: Headroom | None) -> None:
    """Moves a reduction's wait, and what follows from it, to just before the start of the one ``in_flight`` later.

    Moves reductions along the shard axis first, with the following ones along the replicate axis; then the latter's
    waits.
    """
    end = next((node for node in edit.graph.nodes if node.meta.get("phase") == "update"), edit.end)
    for axis in ("shard", "replicate"):
        starts = [node for node in edit.graph.nodes if _starts_a_reduction(node) and node.args[-1] == axis]
        if not starts:
            continue
        order = positions(edit.graph)
        rows = _rows_of_blocks(edit.graph, order)
        for start, target in zip(starts, [*starts[in_flight:], *[end] * in_flight]):
            tail = _tail(start, order)
            last = next((last for first, last in rows if order[start] < order[first]), target)
            sooner = min(_before_rows(target), last, key=order.__getitem__)
            if room is not None and tail:
                sooner = _while_free(start, tail, sooner, plan, room)
            if tail and (order[tail[-1]] < order[target] or sooner is not target):
                edit.move(tail, before=sooner)


def _while_free(start: fx.Node, tail: list[fx.Node], target: fx.Node, plan: Plan, room: Headroom) -> fx.Node:
    """The node up to which the reduction's input, and the wire's copy of it, can stay alive at no cost."""
    taken = nbytes(start.all_input_nodes[0].meta["val"]) + on_wire(start, backend_of(plan.device))
    passed = room.until(tail[-1].next, target, taken)
    if passed:
        room.take(passed, taken)
        room.stand(tail, passed[-1])
        return passed[-1].next
    return tail[-1].next


def _rows_of_blocks(graph: fx.Graph, order: dict[fx.Node, int]) -> list[tuple[fx.Node, fx.Node]]:
    """For each unit of several blocks, in order, the copies of its first and last block in backward."""
    found: list[tuple[fx.Node, fx.Node]] = []
    if not graph.find_nodes(op="call_function", target=split_rows, sort=False):
        return found
    for live_range in live_ranges(graph):
        copies = sorted(_copies(live_range, "backward"), key=order.__getitem__)
        if len(copies) > 1 and any(role_of(node) == "block" for node in live_range.aliases):
            found.append((copies[0], copies[-1]))
    return sorted(found, key=lambda pair: order[pair[0]])


def _before_rows(start: fx.Node) -> fx.Node:
    """The node that lays out this reduction's gradients by rows, in new memory; or the start itself."""
    node = start
    while role_of(node) in ("reduce", "pack", "scale", "flatten") and node.all_input_nodes:
        if node.target is join_rows:
            return node
        node = node.all_input_nodes[0]
    return start


def _tail(start: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """A reduction's wait, the reduction along the next axis with its wait, and scalings and casts, in backward."""
    found: list[fx.Node] = []
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if (
                role_of(user) in ("wait", "reduce", "scale", "cast", "pack", "combine")
                and user.meta["phase"] == "backward"
            ):
                found.append(user)
                stack.append(user)
    return sorted(found, key=order.__getitem__)


def _prefetch(graph: fx.Graph, found: list[LiveRange], plan: Plan) -> tuple[int, str]:
    """How many units ahead to gather, and why."""
    wanted = plan.policy.prefetch
    room = plan.policy.limit - 1 if isinstance(plan.policy.limit, int) else MOST_AHEAD
    if not found:
        return (wanted if isinstance(wanted, int) else 1), ""
    if isinstance(wanted, int):
        return wanted, f"prefetch={wanted}, as given"
    done = list(accumulate(seconds_of(graph, plan.machine, plan.policy.lower == "inductor"), initial=0.0))
    wire = sum(_gathering(live_range, plan) for live_range in found)
    entries = _sequence(graph, found)
    exposed = [_exposed(entries, found, ahead, done, plan) for ahead in range(min(MOST_AHEAD, room) + 1)]
    best = min(1, room)  # however little there is to hide behind, two gathers on the wire share their latency
    while best + 1 < len(exposed) and exposed[best] - exposed[best + 1] > WORTH * wire:
        best += 1
    return best, (
        f"prefetch={best} (auto): {_time(exposed[best])} of {_time(wire)} of gathers are not hidden under "
        f"{_time(done[-1])} of compute (estimates)"
    )


def _exposed(entries: list[Entry], found: list[LiveRange], ahead: int, done: list[float], plan: Plan) -> float:
    """Seconds of waiting for gathers, if one wire serves gathers in order."""
    places = _places(entries)
    free = waited = 0.0
    for live_range in found:
        place = places.get(id(live_range))
        if place is None:
            continue
        issued = done[entries[place - ahead][0]] if place >= ahead else 0.0
        free = max(free, issued + waited) + _gathering(live_range, plan)
        waited += max(0.0, free - (done[entries[place][0]] + waited))
    return waited


def _gathering(live_range: LiveRange, plan: Plan) -> float:
    return plan.transfer(live_range.nbytes, str(live_range.gathers[0].args[-1]))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
