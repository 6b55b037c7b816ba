"""Keeps shards and optimizer state in host memory, and on the device only while they are used.

    before                                     after

    full = all_gather(shard); wait             on = _to_copy(shard, device="cuda", non_blocking=True)    # fetch
    use(full)                                  full = all_gather(on); wait
                                               use(full)
    exp_avg.lerp_(gradient, 0.1)               on, avg = _to_copy(shard, ...), _to_copy(exp_avg, ...)    # fetch
    shard.addcdiv_(exp_avg, ...)               avg.lerp_(gradient, 0.1)
                                               on.addcdiv_(avg, ...)
                                               copy_(shard, on, non_blocking=True)                       # return
                                               copy_(exp_avg, avg, non_blocking=True)

Each gather fetches its shard again, so that the shard does not stay on the device. The update goes buffer by buffer, so
that one buffer's shard and state are on the device at a time. Copies run on the stream of the compute that needs them,
in the program's order, and the host never waits. With one rank there is no gather, and views of a shard share one
fetch. Scalars of an optimizer group, module buffers and sums over microbatches stay on the device.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, Phase, first, last, positions, role_of, versions
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Buffer, Plan

aten = torch.ops.aten
ALONE = ("cast", "pack", "gather")  # each such reader has its own fetch; views share one


def offload(program: Program, plan: Plan) -> Program:
    """Moves shards and per-element state to the plan's state device, and has the program fetch and return them."""
    edit = Edit(program)
    for buffer in plan.buffers:
        held = _held(edit, buffer)
        for stored in held:
            value = stored.meta["val"]
            stored.meta["val"] = edit.fake(value.shape, value.dtype, plan.state_device)
            _fetch_for_reading(edit, stored, buffer, plan)
        _fetch_for_update(edit, held, buffer, plan)
    return edit.done("offload")


def _held(edit: Edit, buffer: Buffer) -> list[fx.Node]:
    """The buffer's shard, and what the optimizer keeps for each of its elements."""
    inputs = edit.inputs.items()
    return [node for port, node in inputs if port.kind in ("shard", "state") and port.name == buffer.key]


def _fetch(edit: Edit, stored: fx.Node, buffer: Buffer, plan: Plan, before: fx.Node, phase: Phase) -> fx.Node:
    with edit.at(before, phase):
        mark = Mark("fetch", buffer.unit, buffer.key)
        return edit.call(aten._to_copy.default, stored, device=plan.device, non_blocking=True, mark=mark)


def _fetch_for_reading(edit: Edit, stored: fx.Node, buffer: Buffer, plan: Plan) -> None:
    """Adds fetches to forward and backward: one for each gather, just before it."""
    readers = [user for user in stored.users if user.meta["phase"] != "update"]
    groups = [[user] for user in readers if role_of(user) in ALONE]
    if shared := [user for user in readers if role_of(user) not in ALONE]:
        groups.append(shared)
    order = positions(edit.graph) if groups else {}
    for group in groups:
        start = first(group, order)
        fetched = _fetch(edit, stored, buffer, plan, start, start.meta["phase"])
        for user in group:
            user.replace_input_with(stored, fetched)


def _fetch_for_update(edit: Edit, held: list[fx.Node], buffer: Buffer, plan: Plan) -> None:
    """Fetches what the buffer's update works on, before its first node; copies what it wrote back, after its last."""
    readers = {stored: [user for user in stored.users if user.meta["phase"] == "update"] for stored in held}
    chains = {stored: versions(stored) for stored in held if readers[stored]}
    if not chains:
        return
    order = positions(edit.graph)
    start = first((user for stored in chains for user in readers[stored]), order)
    end = last({user for chain in chains.values() for node in chain for user in node.users}, order).next
    changed = [stored for stored, chain in chains.items() if len(chain) > 1]
    fetched = {}
    for stored in chains:
        fetched[stored] = _fetch(edit, stored, buffer, plan, start, "update")
        for user in readers[stored]:
            user.replace_input_with(stored, fetched[stored])
    with edit.at(end, "update"):
        for stored in changed:
            mark = Mark("return", buffer.unit, buffer.key)
            edit.call(aten.copy_.default, stored, fetched[stored], True, mark=mark)
