"""Microbatches: gradients are added up over several batches before one update.

`add_up` makes the program of one microbatch, which ends in sums instead of an update:

    before                              after, holding shards           after, holding full gradients

    flat = cat(d_weight, d_bias)        flat = cat(d_weight, d_bias)    flat = cat(d_weight, d_bias)
    part = reduce_scatter(flat)         part = reduce_scatter(flat)     sum += flat
    return gradient = wait(part)        sum += wait(part)

`average` makes the program of the last one, which updates:

    return gradient                     return (gradient + sum) / n     # full gradients: flat + sum is reduced

`clear` runs once ranks have agreed that they all make this step, so that a step that breaks off earlier keeps the sums:

    ...                                 ...
                                        sum = 0

Holding shards costs one reduction a microbatch and a shard of memory. Holding full gradients costs the memory of the
whole gradient on every rank and one reduction a step (DDP's and FSDP's ``no_sync``). The number of microbatches is
counted on the device, so that it may change from step to step. Where ranks are weighed by rows (see `row_weights`),
rows are counted instead of microbatches, and the remaining division happens when the rows of all ranks are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit, weighed
from fsdp_compiled.ir.nodes import Mark, reduction
from fsdp_compiled.ir.program import COUNT, LOSS, SAME, SAME_PARTS, WEIGHT, Port, Program
from fsdp_compiled.plan.plan import Buffer, Plan

aten = torch.ops.aten
TOTAL, BATCHES = (Port("in", "sum", part=part) for part in ("loss", "batches"))
TURN = 3.0  # odd, so that no bit of a batch is lost
Pass = Callable[[Program, Plan], Program]


def add_up(program: Program, plan: Plan) -> Program:
    """Adds gradients to their sums, and this rank's own loss to its sum; the loss also leaves the program unchanged."""
    edit = Edit(program)
    for buffer, port, gradient in _gradients(edit, plan):
        start, total = _sum(edit, buffer, gradient, plan)
        own = start.all_input_nodes[0] if start else gradient
        with edit.at(start or edit.end, "backward" if start else "update"):
            edit.call(aten.add_.Tensor, total, own, mark=_mark(buffer, "add"))
        edit.remove_output(port)
    count, losses = _scalars(edit, plan)
    loss, rows, mark = edit.outputs[LOSS], edit.outputs.get(WEIGHT), Mark("sum")
    assert loss is not None
    with edit.at(edit.end, "update"):
        edit.call(aten.add_.Tensor, count, rows or 1, mark=mark)
        edit.call(aten.add_.Tensor, losses, weighed(edit, loss, rows, mark) if rows else loss, mark=mark)
    if rows:
        edit.remove_output(WEIGHT)
    if (own := edit.outputs.get(SAME)) is not None:
        with edit.at(edit.end, "update"):
            total, joined = _joined(edit, plan, own, mark)
            edit.call(aten.copy_.default, total, joined, mark=mark)
        edit.remove_output(SAME)
    return edit.done("add_up")


def average(added: Collection[str]) -> Pass:
    """The pass for sums in which these parameters have gradients: they are updated, whether or not this batch reaches
    them."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        for port, node in edit.inputs.items():
            if port.kind == "shard" and "idle" in node.meta:
                node.meta["added"] = tuple(name for name in node.meta["idle"] if name in added)
                node.meta["idle"] = tuple(name for name in node.meta["idle"] if name not in added)
        _to_means(edit, plan)
        return edit.done("average")

    transform.__name__ = "average"
    return transform


def _to_means(edit: Edit, plan: Plan) -> None:
    """Gradients and loss become the mean over all microbatches, this batch included."""
    count, losses = _scalars(edit, plan)
    loss = edit.outputs[LOSS]
    assert loss is not None
    rows, mark = edit.outputs.get(WEIGHT), Mark("sum")
    with edit.at(edit.end, "update"):
        batches = edit.call(aten.add.Tensor, count, rows or 1, mark=mark)
        own = weighed(edit, loss, rows, mark) if rows else loss
        mean = edit.call(aten.div.Tensor, edit.call(aten.add.Tensor, losses, own, mark=mark), batches, mark=mark)
        edit.set_output(LOSS, edit.call(aten._to_copy.default, mean, dtype=loss.meta["val"].dtype, mark=mark))
    for buffer, port, gradient in _gradients(edit, plan):
        start, total = _sum(edit, buffer, gradient, plan)
        own = start.all_input_nodes[0] if start else gradient
        with edit.at(start or edit.end, "backward" if start else "update"):
            added = edit.call(aten.add.Tensor, own, total, mark=_mark(buffer, "add"))
        if start:
            start.replace_input_with(own, added)
        with edit.at(edit.end, "update"):
            whole = gradient if start else added
            mean = whole if rows else edit.call(aten.div.Tensor, whole, batches, mark=_mark(buffer, "factor"))
            edit.set_output(port, mean)
    if rows:
        edit.set_output(WEIGHT, batches)
    if (same := edit.outputs.get(SAME)) is not None:
        with edit.at(edit.end, "update"):
            edit.set_output(SAME, _joined(edit, plan, same, mark)[1])


def clear(program: Program, plan: Plan) -> Program:
    """Sets the sums to zero, once they are used."""
    edit = Edit(program)
    with edit.at(edit.end, "update"):
        for port, total in edit.inputs.items():
            if port.kind == "sum":
                edit.call(aten.zero_.default, total, mark=Mark("sum"))
    return edit.done("clear")


def _mark(buffer: Buffer, purpose: str) -> Mark:
    return Mark("sum", buffer.unit, buffer.key, purpose)


def _gradients(edit: Edit, plan: Plan) -> list[tuple[Buffer, Port, fx.Node]]:
    """The gradients that an optimizer will use; other gradients have no sum."""
    found = []
    for port, node in edit.outputs.items():
        if port.kind == "gradient" and node is not None:
            buffer = plan.buffer(port.name)
            if buffer.updated:
                found.append((buffer, port, node))
            else:
                edit.remove_output(port)
    return found


def _sum(edit: Edit, buffer: Buffer, gradient: fx.Node, plan: Plan) -> tuple[fx.Node | None, fx.Node]:
    """The start of the gradient's reduction, if whole gradients are held, and the input that holds the sum."""
    start = reduction(gradient) if plan.policy.accumulate == "full" else None
    value = (start.all_input_nodes[0] if start else gradient).meta["val"]
    return start, edit.add_input(Port("in", "sum", buffer.key), edit.fake(value.shape, value.dtype, value.device))


def _joined(edit: Edit, plan: Plan, own: fx.Node, mark: Mark) -> tuple[fx.Node, fx.Node]:
    """The input that identifies earlier batches, and its value with this batch added; their order counts."""
    total = edit.add_input(BATCHES, edit.fake([SAME_PARTS], torch.float64, plan.device))
    turned = edit.call(aten.mul.Tensor, total, TURN, mark=mark)
    both = edit.call(aten.add.Tensor, turned, own, mark=mark)
    return total, edit.call(aten.remainder.Scalar, both, 2.0**20, mark=mark)  # whose square is exact


def _scalars(edit: Edit, plan: Plan) -> tuple[fx.Node, fx.Node]:
    count, losses = (edit.add_input(port, edit.fake([], torch.float64, plan.device)) for port in (COUNT, TOTAL))
    return count, losses
