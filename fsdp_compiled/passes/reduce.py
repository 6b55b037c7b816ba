"""Flattens a unit's gradients into one buffer, and reduces it over the ranks as soon as the last of them exists.

    before                      after

    d_weight = mm(...)          d_weight = mm(...)
    d_bias = sum(...)           d_bias = sum(...)
    ...                         flat: float32[72] = cat(d_weight, d_bias, padding)
    return d_weight, d_bias     part: float32[36] = reduce_scatter(flat, "avg")
                                ...
                                gradient = wait(part)
                                return gradient

A parameter that the loss does not reach has zeros in its place, and its shard's mark ``idle`` names it. A buffer of
such parameters alone is not reduced, except in a row of microbatches that add up whole gradients (`reduce_row`): other
microbatches may reach it. Where each rank keeps the whole gradient, the reduction is an all-reduce. Along a replicate
axis, an all-reduce follows the reduce-scatter (`ir.reduction`). The wait for one buffer stands just before the
reduction of the next, so that one flat gradient is on the wire and one is being filled, never more.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, Role
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.ir.reduction import Call, reduction
from fsdp_compiled.kernels.aten_operators import join_rows
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.plan.rows import widths

aten = torch.ops.aten


def reduce(program: Program, plan: Plan) -> Program:
    """Replaces gradients by parameter with reduced gradients by buffer, each this rank's shard of the mean."""
    return _reduce(program, plan, all_of_them=False)


def reduce_row(program: Program, plan: Plan) -> Program:
    """The same pass for one of several microbatches."""
    return _reduce(program, plan, all_of_them=plan.policy.accumulate == "full")


def _reduce(program: Program, plan: Plan, all_of_them: bool) -> Program:
    edit = Edit(program)
    gradients = {port.name: node for port, node in edit.outputs.items() if port.kind == "parameter gradient"}
    sharded = [buffer for buffer in plan.buffers if buffer.trainable]
    names = [slot.name for buffer in sharded for slot in buffer.slots if slot.name in gradients]
    edit.remove_output(*(Port("out", "parameter gradient", name) for name in names))
    ready: list[tuple[fx.Node | None, Buffer, dict[str, fx.Node]]] = []
    for buffer in sharded:
        found = {slot.name: node for slot in buffer.slots if (node := gradients.get(slot.name)) is not None}
        edit.inputs[Port("in", "shard", buffer.key)].meta["idle"] = tuple(
            slot.name for slot in buffer.slots if slot.name not in found
        )
        ready.append((max(found.values()) if found else None, buffer, found))
    ready.sort(key=lambda item: (item[0] is None, item[0]))
    # Looked up before anything is inserted: buffers that become whole with the same gradient follow one another.
    following = {node: node.next for node, _, _ in ready if node is not None}
    pending: list[tuple[Buffer, fx.Node, list[Call]]] = []  # with the remaining calls
    reduced: dict[Port, fx.Node] = {}
    for node, buffer, found in ready:
        with edit.at(edit.end if node is None else following[node], "backward"):
            if found or all_of_them:
                flat = _flatten(edit, buffer, found, plan)
                calls = reduction(buffer, flat.meta["val"].dtype, plan)
                while calls and calls[0].role == "scale":
                    flat = _add(edit, buffer, flat, calls.pop(0))
                reduced |= _finish(edit, pending)
                if calls and calls[0].role == "reduce":
                    flat = _add(edit, buffer, flat, calls.pop(0))
                pending.append((buffer, flat, calls))
            else:
                size = buffer.numel // plan.shard if plan.placement.gradient else buffer.numel
                zeros = edit.call(
                    aten.full.default,
                    [size],
                    0.0,
                    dtype=buffer.dtype,
                    device=plan.device,
                    mark=_mark(buffer, "flatten"),
                )
                pending.append((buffer, zeros, []))
    with edit.at(edit.end, "backward"):
        reduced |= _finish(edit, pending)
    edit.set_outputs(reduced)
    return edit.done("reduce", keeps_readers=True)


def _mark(buffer: Buffer, role: Role) -> Mark:
    return Mark(role, buffer.unit, buffer.key)


def _flatten(edit: Edit, buffer: Buffer, gradients: dict[str, fx.Node], plan: Plan) -> fx.Node:
    """``[numel]``: the gradients in the places of their parameters, zero in the padding and for missing gradients.

    The dtype is that of the reduction.
    """
    wanted = plan.reduce_dtype(buffer)
    flat = _concatenated(edit, buffer, gradients, plan)
    if wanted != flat.meta["val"].dtype:
        flat = edit.call(aten._to_copy.default, flat, dtype=wanted, mark=_mark(buffer, "flatten"))
    return flat


def _in_order(edit: Edit, buffer: Buffer, slot: Slot, gradient: fx.Node) -> fx.Node:
    """The gradient with its dims in the order in which the buffer holds the parameter's."""
    if slot.leaf.order == tuple(range(len(slot.leaf.shape))):
        return gradient
    return edit.call(aten.permute.default, gradient, list(slot.leaf.order), mark=_mark(buffer, "flatten"))


def _concatenated(edit: Edit, buffer: Buffer, gradients: dict[str, fx.Node], plan: Plan) -> fx.Node:
    if buffer.by_rows and plan.shard > 1:
        return _concatenated_by_rows(edit, buffer, gradients, plan)
    mark = _mark(buffer, "flatten")
    dtype = next((node.meta["val"].dtype for node in gradients.values()), buffer.dtype)
    pieces: list[fx.Node] = []
    filled = 0

    def pad(stop: int) -> None:
        if stop > filled:
            pieces.append(
                edit.call(aten.full.default, [stop - filled], 0.0, dtype=dtype, device=plan.device, mark=mark)
            )

    for slot in buffer.slots:
        if slot.name not in gradients or slot.leaf.numel == 0:
            continue
        pad(slot.offset)
        gradient = _in_order(edit, buffer, slot, gradients[slot.name])
        if len(slot.leaf.shape) != 1:
            gradient = edit.call(aten.reshape.default, gradient, [slot.leaf.numel], mark=mark)
        pieces.append(gradient)
        filled = slot.end
    pad(buffer.numel)
    return edit.call(aten.cat.default, pieces, mark=mark)


def _concatenated_by_rows(edit: Edit, buffer: Buffer, gradients: dict[str, fx.Node], plan: Plan) -> fx.Node:
    """``[world * n]``: the rows that each rank owns of every gradient, rank by rank."""
    mark = _mark(buffer, "flatten")
    dtype = next((node.meta["val"].dtype for node in gradients.values()), buffer.dtype)
    pieces: list[fx.Node] = []
    for slot, size in zip(buffer.slots, widths(buffer, plan.shard), strict=True):
        if size == 0:
            continue
        if slot.name in gradients and slot.leaf.numel:
            pieces.append(_by_rank(edit, slot, gradients[slot.name], plan.shard, mark))
        else:
            zeros = [size * plan.shard]
            pieces.append(edit.call(aten.full.default, zeros, 0.0, dtype=dtype, device=plan.device, mark=mark))
    parts = edit.call(join_rows, pieces, plan.shard, plan.reduce_dtype(buffer), mark=mark)
    return edit.call(aten.view.default, parts, [buffer.numel], mark=mark)


def _by_rank(edit: Edit, slot: Slot, gradient: fx.Node, world: int, mark: Mark) -> fx.Node:
    """Each rank's part of a dim other than 0, by rank, as rows: of dim 1, ``[4, 6]`` -> ``[world * 4, 6 / world]``."""
    if (dim := slot.leaf.shard_dim) == 0:
        return gradient
    shape = slot.leaf.chunk(world)
    parts = edit.call(aten.view.default, gradient, [*shape[:dim], world, *shape[dim:]], mark=mark)
    order = [dim, *(place for place in range(len(shape) + 1) if place != dim)]
    parts = edit.call(aten.permute.default, parts, order, mark=mark)
    return edit.call(aten.reshape.default, parts, [world * shape[0], *shape[1:]], mark=mark)


def _add(edit: Edit, buffer: Buffer, value: fx.Node, call: Call) -> fx.Node:
    axis = () if call.axis is None else (call.axis,)
    return edit.call(call.target, value, *call.arguments, *axis, **call.options, mark=_mark(buffer, call.role))


def _finish(edit: Edit, pending: list[tuple[Buffer, fx.Node, list[Call]]]) -> dict[Port, fx.Node]:
    """Waits for the reductions on the wire, and adds the reductions along the remaining axis."""
    found = {}
    while pending:
        buffer, part, rest = pending.pop()
        for call in rest:
            part = _add(edit, buffer, part, call)
        found[Port("out", "gradient", buffer.key)] = part
    return found
