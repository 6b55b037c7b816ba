"""A parameter's first use reads a view of its unit's all-gather.

    before                                after

    weight: float32[8, 8]  # parameter    shard: float32[36]  # this rank's slice of the buffer
    bias: float32[8]       # parameter    full: float32[72] = all_gather(shard); wait
                                          weight, bias = views of full
    use(weight, bias)                     use(weight, bias)

Parameters are views of the gathered buffer; nothing is copied out of it, unless it is laid out by rows. A unit with
several buffers (optimizer groups, frozen parameters) still uses one collective. With one rank, or a placement that
keeps a full copy, the shard is the whole buffer and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import groupby
from operator import getitem

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, Role
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.kernels.aten_operators import split_rows
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.plan.rows import widths

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def gather(program: Program, plan: Plan) -> Program:
    """Replaces every full parameter by views of its gathered buffer; one all-gather a unit and dtype."""
    edit = Edit(program)
    given = {port.name: node for port, node in edit.inputs.items() if port.kind == "parameter"}
    for unit in plan.units:
        shards = {
            buffer: edit.input(Port("in", "shard", buffer.key), [plan.shard_numel(buffer)], buffer.dtype, plan.device)
            for buffer in unit.buffers
        }
        for dtype in dict.fromkeys([plan.compute_dtype(buffer) for buffer in unit.buffers]):
            together = {
                buffer: shard
                for buffer, shard in shards.items()
                if plan.compute_dtype(buffer) == dtype and any(slot.name in given for slot in buffer.slots)
            }
            _gather_unit(edit, plan, together, given)
    return edit.done("gather")


def _gather_unit(edit: Edit, plan: Plan, shards: dict[Buffer, fx.Node], given: Mapping[str, fx.Node]) -> None:
    """Gathers these buffers of one unit just before the first use of any of their parameters."""
    names = [slot.name for buffer in shards for slot in buffer.slots]
    used = {name: given[name] for name in names if name in given}
    users = [user for node in used.values() for user in node.users]
    if users:
        start = min(users)
        with edit.at(start, start.meta["phase"]):
            for name, view in _parameters(edit, plan, shards, used):
                view.meta["parameter"] = name
                used[name].replace_all_uses_with(view)
    edit.remove_inputs([Port("in", "parameter", name) for name in used])


def _parameters(
    edit: Edit, plan: Plan, shards: dict[Buffer, fx.Node], used: Mapping[str, fx.Node]
) -> list[tuple[str, fx.Node]]:
    """Each used parameter, by name, taken from its gathered buffer."""
    found = []
    for buffer, full in _full(edit, plan, shards):
        if buffer.by_rows and plan.shard > 1:  # parameters are copied out where they are used
            found += _copies(edit, buffer, full, used, plan.shard)
        else:
            found += _views(edit, buffer, full, used)
    return found


def _mark(buffer: Buffer, role: Role) -> Mark:
    return Mark(role, buffer.unit, buffer.key)


def _full(edit: Edit, plan: Plan, shards: dict[Buffer, fx.Node]) -> list[tuple[Buffer, fx.Node]]:
    """The whole buffers, ``[numel]`` each, in the compute dtype; one collective carries several buffers."""
    own = []
    for buffer, shard in shards.items():
        dtype = plan.compute_dtype(buffer)
        cast = dtype != buffer.dtype
        own.append(edit.call(aten._to_copy.default, shard, dtype=dtype, mark=_mark(buffer, "cast")) if cast else shard)
    buffers = list(shards)
    if not plan.placement.parameter or plan.shard == 1:
        return list(zip(buffers, own, strict=True))
    mark = _mark(buffers[0], "gather")
    if len(own) == 1:
        parts = [edit.call(c10d.all_gather_into_tensor.default, own[0], plan.shard, "shard", mark=mark)]
    else:
        together = edit.call(c10d.all_gather_into_tensor_coalesced.default, own, plan.shard, "shard", mark=mark)
        parts = [
            edit.call(getitem, together, index, mark=_mark(buffer, "part")) for index, buffer in enumerate(buffers)
        ]
    return [
        (buffer, edit.call(c10d.wait_tensor.default, part, mark=_mark(buffer, "wait")))
        for buffer, part in zip(buffers, parts, strict=True)
    ]


def _views(edit: Edit, buffer: Buffer, full: fx.Node, wanted: Container[str]) -> list[tuple[str, fx.Node]]:
    """Each wanted parameter as a view, in its own shape and strides.

    A unit with several blocks is first sliced by block: equal blocks then look the same from inside, whatever their
    place in the unit.
    """
    rows = [list(slots) for _, slots in groupby(buffer.slots, key=lambda slot: slot.leaf.block)]
    starts = [row[0].offset for row in rows] + [buffer.numel]
    found = []
    for row, start, stop in zip(rows, starts, starts[1:]):
        if any(slot.name in wanted for slot in row):
            mark = Mark("block", buffer.unit, buffer.key)
            whole = edit.call(aten.slice.Tensor, full, 0, start, stop, mark=mark) if len(rows) > 1 else full
            found += _views_of_block(edit, buffer, whole, row, stop, wanted)
    return found


def _copies(
    edit: Edit, buffer: Buffer, full: fx.Node, used: Mapping[str, fx.Node], world: int
) -> list[tuple[str, fx.Node]]:
    """Each used parameter of a buffer that is laid out by rows, joined from its part of every rank's shard.

    In a unit with several blocks, each block is copied at its first use: at most one block of a unit is in memory
    twice.
    """
    mark = Mark("view", buffer.unit, buffer.key)
    parts = edit.call(aten.view.default, full, [world, buffer.numel // world], mark=mark)
    sized = zip(buffer.slots, widths(buffer, world), strict=True)
    rows = [list(row) for _, row in groupby(sized, key=lambda one: one[0].leaf.block)]
    found = []
    for row in rows:
        users = [user for slot, _ in row if slot.name in used for user in used[slot.name].users]
        if not users:
            continue
        start = min(users)
        with edit.at(start, start.meta["phase"]):
            block = parts
            if len(rows) > 1:
                begin, end = row[0][0].offset, row[-1][0].offset + row[-1][1]
                block = edit.call(aten.slice.Tensor, parts, 1, begin, end, mark=replace(mark, role="block"))
            sizes = [size for _, size in row]
            split = edit.call(split_rows, block, sizes, mark=mark)
            found += [
                (slot.name, _whole(edit, slot, edit.call(getitem, split, index, mark=mark), mark, world))
                for index, (slot, _) in enumerate(row)
                if slot.name in used
            ]
    return found


def _whole(edit: Edit, slot: Slot, rows: fx.Node, mark: Mark, world: int) -> fx.Node:
    """The parameter, of its rows of every rank's shard: ``[world, n]``, zeros after the last (`plan.rows.whole`)."""
    leaf, size = slot.leaf, rows.meta["val"].numel()
    if (dim := leaf.shard_dim) != 0:
        rows = edit.call(aten.view.default, rows, [world, *leaf.chunk(world)], mark=mark)
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(leaf.shape) + 1)]
        rows = edit.call(aten.permute.default, rows, order, mark=mark)
        rows = edit.call(aten.clone.default, rows, memory_format=torch.contiguous_format, mark=mark)
    elif size != leaf.numel:
        rows = edit.call(aten.view.default, rows, [size], mark=mark)
        rows = edit.call(aten.slice.Tensor, rows, 0, 0, leaf.numel, mark=mark)
    return edit.call(aten.view.default, rows, list(leaf.shape), mark=mark)


def _views_of_block(
    edit: Edit, buffer: Buffer, whole: fx.Node, slots: list[Slot], stop: int, wanted: Container[str]
) -> list[tuple[str, fx.Node]]:
    """The views of one block's part of the buffer, which ends at ``stop``."""
    mark = Mark("view", buffer.unit, buffer.key)
    bounds = [slot.offset for slot in slots[1:]] + [stop]
    sizes = [bound - slot.offset for slot, bound in zip(slots, bounds, strict=True)]
    split = edit.call(aten.split_with_sizes.default, whole, sizes, mark=mark) if len(sizes) > 1 else None
    found = []
    for index, slot in enumerate(slots):
        if slot.name not in wanted:
            continue
        leaf = slot.leaf
        view = whole if split is None else edit.call(getitem, split, index, mark=mark)
        if sizes[index] != leaf.numel:
            view = edit.call(aten.slice.Tensor, view, 0, 0, leaf.numel, mark=mark)
        if split is None or len(leaf.shape) != 1:
            view = edit.call(aten.view.default, view, [leaf.shape[dim] for dim in leaf.order], mark=mark)
        if leaf.order != tuple(range(len(leaf.shape))):
            inverse = [leaf.order.index(dim) for dim in range(len(leaf.shape))]
            view = edit.call(aten.permute.default, view, inverse, mark=mark)
        found.append((slot.name, view))
    return found
