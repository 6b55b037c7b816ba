"""All-reduces the mean loss and the gradient's norm of a step, in one small message.

    before              after

    return loss         mine: float64[8] = cat(loss, squares of this rank's gradient shards, call, call * call)
                        all = all_reduce(mine, "sum"); wait
                        assert all(world * all[5:8] == all[2:5] * all[2:5])
                        return loss = all[0] / world, norm = sqrt(all[1] / copies)

``call`` is a hash of the program that this rank runs and of its rates, in three parts of 20 bits, so that the sums of
squares over 8,192 ranks are exact. By Cauchy and Schwarz the assertion holds exactly when all ranks have the same hash.
So ranks that call with different shapes or rates stop before anything is updated, at no cost.

The squared norm of a sum is not the sum of squared norms. So the norm is taken after the reduction, on the shards, with
each element counted once: padding is zero, and copies on a replicate axis are divided out. The same message carries the
number of gradients that are not finite, under ``Policy.loss_scale``, and this rank's number of rows, where ranks are
weighed by rows (see `row_weights`).

Under tensor parallelism the message goes along the tp axis first. Ranks along it have the same loss, and parts of some
gradients and copies of others, which count once. They also have the same batch, which is compared (see `same_batches`):

    all = all_reduce([mine, same, same * same], "sum", "tp"); wait
    odd = sum(tp * all[same * same] - all[same] ** 2)           # zero where all are equal
    all = all_reduce([all, odd], "sum", "shard"); wait
    assert all[odd] == 0
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit, weighed
from fsdp_compiled.ir.nodes import ASSERT, DISAGREE, OTHER_BATCHES, Mark
from fsdp_compiled.ir.program import (
    CALL,
    CALL_PARTS,
    LOSS,
    NORM,
    OVERFLOW,
    SAME,
    SAME_PARTS,
    WEIGHT,
    Port,
    Program,
)
from fsdp_compiled.plan.plan import Buffer, Plan

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def report(program: Program, plan: Plan) -> Program:
    """Averages the loss over the ranks and adds the gradient's norm, float32, as an output."""
    edit = Edit(program)
    mark = Mark("norm")
    outputs = edit.outputs
    loss = outputs[LOSS]
    assert loss is not None
    dtype = loss.meta["val"].dtype
    gradients = {
        buffer: node
        for buffer in plan.buffers
        if buffer.updated and (node := outputs.get(Port("out", "gradient", buffer.key))) is not None
    }
    ranks = plan.world * plan.tp
    with edit.at(edit.end, "update"):
        rows = outputs.get(WEIGHT)
        own = edit.call(aten._to_copy.default, loss, dtype=torch.float64, mark=mark)
        mine = [weighed(edit, own, rows, mark) if rows else own]
        if gradients:
            mine.append(_squares(edit, gradients, plan, mark))
        overflow = outputs.get(OVERFLOW)
        if overflow is not None:
            mine.append(overflow)
        if rows:
            mine.append(rows)
        said: list[fx.Node] = []
        if plan.all_axes:
            call = edit.add_input(CALL, edit.fake([CALL_PARTS], torch.float64, plan.device))
            said = [call, edit.call(aten.mul.Tensor, call, call, mark=mark)]
        packet = edit.call(aten.stack.default, mine, mark=mark)
        if said:
            packet = edit.call(aten.cat.default, [packet, *said], mark=mark)
        packet, odd = _summed_over_ranks(edit, packet, len(mine) + 2 * CALL_PARTS * bool(said), plan, mark)
        if plan.all_axes:
            _assert_same(edit, packet, len(mine), ranks, mark)
        if odd is not None:
            _assert_same_batches(edit, odd, mark)
        mean = edit.call(aten.select.int, packet, 0, 0, mark=mark)
        count: fx.Node | int = ranks
        if rows:
            count = edit.call(aten.select.int, packet, 0, mine.index(rows), mark=mark)
            edit.set_output(WEIGHT, edit.call(aten.div.Tensor, count, ranks, mark=mark))
        mean = edit.call(aten.div.Tensor, mean, count, mark=mark)
        edit.set_output(LOSS, edit.call(aten._to_copy.default, mean, dtype=dtype, mark=mark))
        if overflow is not None:
            edit.set_output(OVERFLOW, edit.call(aten.select.int, packet, 0, mine.index(overflow), mark=mark))
        if gradients:
            copies = plan.world // plan.shard if plan.placement.gradient else plan.world
            squares = edit.call(aten.select.int, packet, 0, 1, mark=mark)
            root = edit.call(aten.sqrt.default, edit.call(aten.div.Tensor, squares, copies, mark=mark), mark=mark)
            edit.set_output(NORM, edit.call(aten._to_copy.default, root, dtype=torch.float32, mark=mark))
    return edit.done("report", keeps_readers=True)


def compare_batches(program: Program, plan: Plan) -> Program:
    """The comparison of batches alone, at the end of a program that reports nothing else."""
    edit = Edit(program)
    mark = Mark("norm")
    with edit.at(edit.end, "update"):
        nothing = edit.call(aten.full.default, [0], 0.0, dtype=torch.float64, device=plan.device, mark=mark)
        _, odd = _summed_over_ranks(edit, nothing, 0, plan, mark)
        assert odd is not None
        _assert_same_batches(edit, odd, mark)
    return edit.done("compare_batches")


def _summed_over_ranks(
    edit: Edit, packet: fx.Node, size: int, plan: Plan, mark: Mark
) -> tuple[fx.Node, fx.Node | None]:
    """The sums of these numbers over all ranks, and a number that is zero where ranks along tp have the same batch."""

    def all_reduce(value: fx.Node, axis: str) -> fx.Node:
        value = edit.call(c10d.all_reduce.default, value, "sum", axis, mark=mark)
        return edit.call(c10d.wait_tensor.default, value, mark=mark)

    same = edit.outputs.get(SAME)
    if same is not None:
        edit.remove_output(SAME)
        square = edit.call(aten.mul.Tensor, same, same, mark=mark)
        packet = all_reduce(edit.call(aten.cat.default, [packet, same, square], mark=mark), "tp")
        total = edit.call(aten.slice.Tensor, packet, 0, size, size + SAME_PARTS, mark=mark)
        squares = edit.call(aten.slice.Tensor, packet, 0, size + SAME_PARTS, size + 2 * SAME_PARTS, mark=mark)
        # By Cauchy and Schwarz, zero where all are equal, and larger otherwise; exact, see `same_batches`.
        left = edit.call(aten.mul.Tensor, squares, plan.tp, mark=mark)
        odd = edit.call(aten.sub.Tensor, left, edit.call(aten.mul.Tensor, total, total, mark=mark), mark=mark)
        packet = edit.call(aten.slice.Tensor, packet, 0, 0, size, mark=mark)
        packet = edit.call(aten.cat.default, [packet, odd], mark=mark)
    for axis, _ in plan.axes:
        packet = all_reduce(packet, axis)
    if same is None:
        return packet, None
    return packet, edit.call(aten.slice.Tensor, packet, 0, size, size + SAME_PARTS, mark=mark)


def _assert_same_batches(edit: Edit, odd: fx.Node, mark: Mark) -> None:
    same = edit.call(aten.all.default, edit.call(aten.eq.Scalar, odd, 0, mark=mark), mark=mark)
    edit.call(ASSERT, same, OTHER_BATCHES, mark=Mark("agree"))


def _assert_same(edit: Edit, packet: fx.Node, size: int, world: int, mark: Mark) -> None:
    call = edit.call(aten.slice.Tensor, packet, 0, size, size + CALL_PARTS, mark=mark)
    square = edit.call(aten.slice.Tensor, packet, 0, size + CALL_PARTS, size + 2 * CALL_PARTS, mark=mark)
    left = edit.call(aten.mul.Tensor, square, world, mark=mark)
    same = edit.call(aten.eq.Tensor, left, edit.call(aten.mul.Tensor, call, call, mark=mark), mark=mark)
    same = edit.call(aten.all.default, same, mark=mark)
    edit.call(ASSERT, same, DISAGREE, mark=Mark("agree"))


def _squares(edit: Edit, gradients: dict[Buffer, fx.Node], plan: Plan, mark: Mark) -> fx.Node:
    """Float64: this rank's part of the squared norm. Ranks along tp share the gradients that each of them has whole."""
    if plan.tp == 1:
        return _sum_of_squares(edit, list(gradients.values()), mark, "squares")
    total = None
    for split in (True, False):
        if found := [node for buffer, node in gradients.items() if buffer.split == split]:
            squares = _sum_of_squares(edit, found, mark, "")
            if not split:
                squares = edit.call(aten.div.Tensor, squares, plan.tp, mark=mark)
            total = squares if total is None else edit.call(aten.add.Tensor, total, squares, mark=mark)
    assert total is not None
    return total


def _sum_of_squares(edit: Edit, gradients: list[fx.Node], mark: Mark, purpose: str) -> fx.Node:
    """Float64; takes each gradient's norm in float32, or in float64 if any gradient is float64."""
    double = any(gradient.meta["val"].dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if double else torch.float32
    norms = [
        edit.call(aten.linalg_vector_norm.default, gradient, 2, None, False, dtype=dtype, mark=mark)
        for gradient in gradients
    ]
    stacked = edit.call(aten.stack.default, norms, mark=mark)
    stacked = edit.call(aten._to_copy.default, stacked, dtype=torch.float64, mark=mark)
    squares = edit.call(aten.mul.Tensor, stacked, stacked, mark=mark)
    return edit.call(aten.sum.default, squares, mark=replace(mark, purpose=purpose))
