"""A parameter's first use reads a view of its unit's all-gather.

    before                                after

    weight: float32[8, 8]  # parameter    shard: float32[36]  # this rank's slice of the buffer
    bias: float32[8]       # parameter    full: float32[72] = all_gather(shard); wait
                                          weight, bias = views of full
    use(weight, bias)                     use(weight, bias)

The gathered buffer is the parameters: nothing is copied out of it. With one rank, or a placement that keeps a full
copy, the shard is the buffer and there is nothing to gather.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from fsdp_compiled.plan import Buffer, Plan, Slot
from fsdp_compiled.program import Edit, Mark, Port, Program, first, positions

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def gather(program: Program, plan: Plan) -> Program:
    """Replaces every full parameter by views of its gathered buffer; one all-gather a buffer."""
    edit = Edit(program)
    for buffer in plan.buffers:
        value = edit.fake([plan.shard_numel(buffer)], buffer.dtype, plan.device)
        shard = edit.add_input(Port("in", "shard", buffer.key), value)
        order = positions(edit.graph)
        used = {slot: edit.inputs[port] for slot in buffer.slots if (port := _port(slot)) in edit.inputs}
        users = [user for node in used.values() for user in node.users]
        if not users:
            continue
        start = first(users, order)
        if start.op == "output":
            raise ValueError(f"Unit {buffer.unit}: a parameter is returned as it is; return a clone of it.")
        with edit.at(start, start.meta["phase"]):
            full = _full(edit, buffer, plan, shard)
            for slot, view in _views(edit, buffer, full, list(used)):
                used[slot].replace_all_uses_with(view)
        for slot in used:
            edit.remove_input(_port(slot))
    return edit.done("gather")


def _port(slot: Slot) -> Port:
    return Port("in", "parameter", slot.name)


def _full(edit: Edit, buffer: Buffer, plan: Plan, shard: fx.Node) -> fx.Node:
    def mark(role: str) -> Mark:
        return Mark(role, buffer.unit, buffer.key)  # type: ignore[arg-type]

    full, dtype = shard, plan.compute_dtype(buffer)
    if dtype != buffer.dtype:
        full = edit.call(aten._to_copy.default, full, dtype=dtype, mark=mark("cast"))
    if plan.placement.parameter and plan.shard > 1:
        full = edit.call(c10d.all_gather_into_tensor.default, full, plan.shard, "shard", mark=mark("gather"))
        full = edit.call(c10d.wait_tensor.default, full, mark=mark("wait"))
    return full


def _views(edit: Edit, buffer: Buffer, full: fx.Node, wanted: list[Slot]) -> list[tuple[Slot, fx.Node]]:
    """Each wanted parameter as a view, in its own shape and strides."""
    mark = Mark("view", buffer.unit, buffer.key)
    bounds = [slot.offset for slot in buffer.slots[1:]] + [buffer.numel]
    pieces = [bound - slot.offset for slot, bound in zip(buffer.slots, bounds, strict=True)]
    split = edit.call(aten.split_with_sizes.default, full, pieces, mark=mark) if len(pieces) > 1 else None
    found = []
    for index, slot in enumerate(buffer.slots):
        if slot not in wanted:
            continue
        leaf = slot.leaf
        view = full if split is None else edit.call(getitem, split, index, mark=mark)
        if pieces[index] != leaf.numel:
            view = edit.call(aten.slice.Tensor, view, 0, 0, leaf.numel, mark=mark)
        view = edit.call(aten.view.default, view, [leaf.shape[dim] for dim in leaf.order], mark=mark)
        if leaf.order != tuple(range(len(leaf.shape))):
            inverse = [leaf.order.index(dim) for dim in range(len(leaf.shape))]
            view = edit.call(aten.permute.default, view, inverse, mark=mark)
        found.append((slot, view))
    return found
