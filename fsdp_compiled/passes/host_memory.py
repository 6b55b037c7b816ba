"""Keeps in host memory what the device need not hold meanwhile. Copies go there and back beside compute.

`store_saved` moves chosen saved values to host memory until backward, so that a step fits its memory:

    before                                after, for ``{"gelu_3"}``

    gelu_3 = gelu(u)                      gelu_3 = gelu(u)
    y = mm(gelu_3, t(down))               y = mm(gelu_3, t(down))
    z = mm(y, up)                         sent = store_(room, gelu_3)             # to the host, beside what follows
    ...                                   z = mm(y, up)
                                          there = stored(sent, gelu_3)            # gelu_3 is freed here
                                          ...
    ...                                   back = restore(there, "cuda")           # from the host, beside backward
                                          ...
    d_down = mm(t(gelu_3), d_y)           gelu_3' = restored(back, there)
                                          d_down = mm(t(gelu_3'), d_y)

`runtime.programs.memory_budget` chooses the values (`saved_values.storable`). A value that backward no longer reads
stays. The pass runs after all passes that move compute, and before `limit`.

`offload` keeps shards and optimizer state in host memory, and on the device only while they are used:

    full_a = all_gather(a); wait          on_a' = restore(a, "cuda")              # fetch
    use(full_a)                           on_a = restored(on_a', a)
    full_b = all_gather(b); wait          on_b' = restore(b, "cuda")              # fetch, beside the use of a
    use(full_b)                           full_a = all_gather(on_a); wait
                                          use(full_a)
                                          on_b = restored(on_b', b)
                                          ...
    a.addcdiv_(avg_a, ...)                on_a, avg = restored(...), restored(...)
    b.addcdiv_(avg_b, ...)                on_b', avg_b' = restore(b, "cuda"), restore(avg_b, "cuda")
                                          on_a.addcdiv_(avg, ...)
                                          sent = store_(a, on_a)                  # return, beside the update of b
                                          ...

Each gather fetches its shards again, so that they do not stay on the device. The update goes buffer by buffer: one
arrives and one leaves while a third is updated. With one rank there is no gather, and views of a shard share one fetch.
Scalars of an optimizer group, module buffers and sums over microbatches stay on the device. The pass runs last, when it
is known where gathers start.

Both bound what is under way (`saved_values.AHEAD` values; the buffers of one unit). A copy to the host starts behind
the last use, and is waited for before the start of the copy so many after it, at the latest where its phase ends. A
copy from the host starts where the copy so many before it has arrived, at the earliest where its phase begins. A copy
is exact: no number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import fx

from fsdp_compiled.analysis.saved_values import AHEAD, Kept, kept
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, Phase, Role, fake_tensor, first, last, owner, positions, role_of, versions
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.kernels.host_copies import operators
from fsdp_compiled.plan.plan import Buffer, Plan

ALONE = ("cast", "pack", "gather")  # each such reader has its own fetch; views share one


class _Copy(NamedTuple):
    """``place``: the node before which a copy to the host starts, and one from the host has to have arrived."""

    mark: Mark
    room: fx.Node
    place: fx.Node
    value: fx.Node | None = None  # that is sent
    readers: Sequence[fx.Node] = ()  # of the room, which are to read what arrives


def store_saved(names: Collection[str]) -> Callable[[Program, Plan], Program]:
    """The pass for forward values of these names."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        order = positions(edit.graph)
        found = [one for node in edit.graph.nodes if node.name in names and (one := kept(node, order))]
        if not found:
            return program.after("store_saved")
        found.sort(key=lambda one: order[one.last])
        sent = [[_Copy(_mark("store", one), _room(edit, one), one.last.next, one.value)] for one in found]
        turn = next(node for node in edit.graph.nodes if node.meta.get("phase", "forward") != "forward")
        stored = _send(edit, sent, AHEAD, turn, "forward")
        pairs = zip(found, stored, strict=True)
        back = [(one, _Copy(_mark("restore", one), room, one.readers[0])) for one, room in pairs]
        back.sort(key=lambda pair: order[pair[1].place])
        for (one, _), value in zip(back, _bring(edit, [[copy] for _, copy in back], AHEAD, plan), strict=True):
            _read(edit, one, value)
        return edit.done("store_saved")

    return transform


def offload(program: Program, plan: Plan) -> Program:
    """Moves shards and per-element state to the plan's state device, and has the program fetch and return them."""
    edit = Edit(program)
    order = positions(edit.graph)
    fetches = [one for buffer in plan.buffers for one in _fetches(edit, buffer, plan, order)]
    rows = [list(row) for _, row in groupby(sorted(fetches, key=lambda one: order[one.place]), key=_together)]
    arrived = iter(_bring(edit, rows, 1, plan))
    back = []
    for row in rows:
        changed = []
        for one in row:
            value = next(arrived)
            for reader in one.readers:
                reader.replace_input_with(one.room, value)
            if len(versions(value)) > 1:
                changed.append(one._replace(mark=replace(one.mark, role="return"), value=value))
        back += [changed] if changed else []
    order = positions(edit.graph)
    for row in back:
        users = {user for one in row for version in versions(one.value) for user in version.users}
        row[:] = [one._replace(place=last(users, order).next) for one in row]
    _send(edit, back, 1, edit.end, "update")
    return edit.done("offload")


def _fetches(edit: Edit, buffer: Buffer, plan: Plan, order: dict[fx.Node, int]) -> Iterator[_Copy]:
    """What the buffer's shard, and what the optimizer keeps for each of its elements, are fetched for: each gather, by
    itself; and the update, all before its first node."""
    mark = Mark("fetch", buffer.unit, buffer.key)
    updates = {}
    for port, room in edit.inputs.items():
        if port.kind not in ("shard", "state") or port.name != buffer.key:
            continue
        value = room.meta["val"]
        room.meta["val"] = edit.fake(value.shape, value.dtype, plan.state_device)
        updates[room] = [user for user in room.users if user.meta["phase"] == "update"]
        readers = [user for user in room.users if user.meta["phase"] != "update"]
        shared = [user for user in readers if role_of(user) not in ALONE]
        for group in [[user] for user in readers if role_of(user) in ALONE] + [shared] * bool(shared):
            yield _Copy(mark, room, first(group, order), readers=group)
    start = min((user for users in updates.values() for user in users), key=order.__getitem__, default=None)
    for room, users in updates.items():
        if users and start is not None:
            yield _Copy(mark, room, start, readers=users)


def _together(fetch: _Copy) -> tuple[str, ...]:
    """Equal for fetches that start together."""
    phase = fetch.place.meta["phase"]
    return phase, fetch.mark.unit, fetch.mark.buffer if phase == "update" else ""


def _send(edit: Edit, rows: Sequence[Sequence[_Copy]], ahead: int, end: fx.Node, phase: Phase) -> list[fx.Node]:
    """Copies values to their rooms, ``ahead`` rows of them at once; returns each room once its copy has ended."""
    sent: list[list[fx.Node]] = [[] for _ in rows]
    for row, own in zip(rows, sent, strict=True):
        for one in row:
            with edit.at(one.place, phase):
                own.append(edit.call(operators.store_.default, one.room, one.value, mark=one.mark))
    stored = []
    for row, own, later in zip(rows, sent, [*(row[0] for row in sent[ahead:]), *[end] * ahead]):
        with edit.at(later, phase):
            for one, start in zip(row, own, strict=True):
                mark = replace(one.mark, role="stored")
                stored.append(edit.call(operators.stored.default, start, one.value, mark=mark))
                stored[-1].meta["effect"] = True  # nothing reads a shard that went back
    return stored


def _bring(edit: Edit, rows: Sequence[Sequence[_Copy]], ahead: int, plan: Plan) -> list[fx.Node]:
    """Copies rooms to the device, ``ahead`` rows of them at once; returns each value once it has arrived."""
    begins = {node.meta.get("phase"): node for node in reversed(edit.graph.nodes)}
    arrived: list[list[fx.Node]] = []
    for index, row in enumerate(rows):
        phase = row[0].place.meta["phase"]
        before = arrived[index - ahead][-1] if index >= ahead else None
        start = before.next if before is not None and before.meta["phase"] == phase else begins[phase]
        with edit.at(start, phase):
            values = [edit.call(operators.restore.default, one.room, plan.device, mark=one.mark) for one in row]
        arrived.append([])
        for one, value in zip(row, values, strict=True):
            with edit.at(one.place, phase):
                mark = replace(one.mark, role="restored")
                arrived[-1].append(edit.call(operators.restored.default, value, one.room, mark=mark))
    return [one for row in arrived for one in row]


def _room(edit: Edit, one: Kept) -> fx.Node:
    example = one.value.meta["val"]
    like = fake_tensor(edit.mode, tuple(example.shape), example.stride(), example.dtype, torch.device("cpu"))
    return edit.add_input(Port("in", "room", one.name), like)


def _mark(role: Role, one: Kept) -> Mark:
    return Mark(role, owner(one.value), one.name)


def _read(edit: Edit, one: Kept, value: fx.Node) -> None:
    """Replaces the value by the one that came back, and repeats its views."""
    made = {one.value: value}
    for reader in one.readers:
        for wanted in [source for source in reader.all_input_nodes if source in one.aliases]:
            chain, source = [], wanted
            while source not in made:
                chain.append(source)
                source = source.all_input_nodes[0]
            with edit.at(reader, reader.meta["phase"]):
                for alias in reversed(chain):
                    made[alias] = edit.clone(alias, made)
            reader.replace_input_with(wanted, made[wanted])
