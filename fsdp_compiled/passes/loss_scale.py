"""Loss scaling for fp16: backward starts from a scaled loss, and a step whose gradients overflow updates nothing.

    before                          after

    d_loss = 1                      d_loss = factor                             # scale
    ...                             ...
    gradient = wait(part)           gradient = wait(part)                       # unscale
                                    overflow = max(abs(gradient)) is not finite
    return gradient                 return gradient * (1 / factor)
    ...                             (report sums overflow over the ranks, clip, update)
    exp_avg.lerp_(gradient, 0.1)    before = clone(exp_avg)                     # skip
                                    exp_avg.lerp_(gradient, 0.1)
                                    exp_avg = where(overflow, before, exp_avg)
                                    factor *= backoff or growth or 1

Gradients show an overflow once they are reduced, since an infinity or a NaN in any term makes the sum infinite or NaN.
The flag is a number on the device, so nothing waits for it. The factor follows the rule of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, first, last, positions, versions
from fsdp_compiled.ir.program import FACTOR, OVERFLOW, Port, Program
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.policy import LossScale

aten = torch.ops.aten
GOOD, OVERFLOWS = (Port("in", "scale", name) for name in ("good", "overflows"))
MARK = Mark("scale")


def scale(program: Program, plan: Plan) -> Program:
    """The derivative of the loss by itself becomes the factor, in the dtype of the loss."""
    edit = Edit(program)
    factor = edit.add_input(FACTOR, edit.fake([], torch.float32, plan.device))
    for seed in [node for node in edit.graph.nodes if node.meta.get("seed")]:
        seed.target, seed.args, seed.kwargs = aten._to_copy.default, (factor,), {"dtype": seed.meta["val"].dtype}
        edit.infer(seed)
    return edit.done("scale")


def unscale(program: Program, plan: Plan) -> Program:
    """Divides gradients by the factor, and adds an output: how many of this rank's gradients are not finite."""
    edit = Edit(program)
    with edit.at(edit.end, "update"):
        inverse = edit.call(aten._to_copy.default, edit.inputs[FACTOR], dtype=torch.float64, mark=MARK)
        inverse = edit.call(aten.reciprocal.default, inverse, mark=MARK)
        inverse = edit.call(aten._to_copy.default, inverse, dtype=torch.float32, mark=MARK)
        largest = []
        for port, gradient in edit.outputs.items():
            if port.kind == "gradient" and gradient is not None:
                mark = Mark("scale", plan.buffer(port.name).unit, port.name, "factor")
                if plan.buffer(port.name).updated:
                    size = edit.call(aten.linalg_vector_norm.default, gradient, math.inf, mark=MARK)
                    largest.append(edit.call(aten._to_copy.default, size, dtype=torch.float64, mark=MARK))
                edit.set_output(port, edit.call(aten.mul.Tensor, gradient, inverse, mark=mark))
        if largest:
            finite = edit.call(aten.lt.Scalar, edit.call(aten.stack.default, largest, mark=MARK), math.inf, mark=MARK)
            odd = edit.call(aten.logical_not.default, finite, mark=MARK)
            mark = Mark("scale", purpose="nonfinite")
            edit.set_output(OVERFLOW, edit.call(aten.sum.dim_IntList, odd, None, dtype=torch.float64, mark=mark))
    return edit.done("unscale")


def skip(program: Program, plan: Plan) -> Program:
    """Restores what the update wrote where the step overflowed, and changes the factor."""
    edit = Edit(program)
    count, scaling = edit.outputs.get(OVERFLOW), plan.policy.scaling
    if count is not None and scaling is not None:
        with edit.at(count.next, "update"):
            overflow = edit.call(aten.gt.Scalar, count, 0, mark=MARK)
        _put_all_back(edit, overflow)
        with edit.at(edit.end, "update"):
            _move_on(edit, scaling, overflow, plan)
        edit.set_output(OVERFLOW, overflow)
    return edit.done("skip")


def _put_all_back(edit: Edit, overflow: fx.Node) -> None:
    order = positions(edit.graph)
    for port, target in edit.inputs.items():
        if port.kind in ("shard", "state") and len(chain := versions(target)) > 1:
            _put_back(edit, chain, overflow, order)


def _put_back(edit: Edit, chain: list[fx.Node], overflow: fx.Node, order: dict[fx.Node, int]) -> None:
    """``target = where(overflow, before, target)``, after its last reader; a group's scalars are read until the end."""
    target, begin = chain[0], first(chain[1:], order)
    mark = replace(begin.meta["mark"], purpose="void")
    end = last({user for node in chain for user in node.users}, order).next if target.meta["val"].dim() else edit.end
    with edit.at(begin, "update"):
        before = edit.call(aten.clone.default, target, mark=mark)
    with edit.at(end, "update"):
        kept = edit.call(aten.where.self, overflow, before, target, mark=mark)
        edit.call(aten.copy_.default, target, kept, mark=mark)


def _move_on(edit: Edit, scaling: LossScale, overflow: fx.Node, plan: Plan) -> None:
    total = edit.add_input(OVERFLOWS, edit.fake([], torch.int64, plan.device))
    edit.call(aten.add_.Tensor, total, overflow, mark=MARK)
    if not scaling.dynamic:
        return
    factor = edit.inputs[FACTOR]
    good = edit.add_input(GOOD, edit.fake([], torch.int32, plan.device))
    row = edit.call(aten.add.Tensor, good, 1, mark=MARK)
    grows = edit.call(aten.eq.Scalar, row, scaling.interval, mark=MARK)
    exact = edit.call(aten._to_copy.default, factor, dtype=torch.float64, mark=MARK)
    larger = edit.call(aten.mul.Tensor, exact, scaling.growth, mark=MARK)
    larger = edit.call(aten._to_copy.default, larger, dtype=torch.float32, mark=MARK)
    within = edit.call(aten.lt.Scalar, larger, math.inf, mark=MARK)  # else the factor stays
    larger = edit.call(
        aten.where.self, edit.call(aten.logical_and.default, grows, within, mark=MARK), larger, factor, mark=MARK
    )
    smaller = edit.call(aten.mul.Tensor, exact, scaling.backoff, mark=MARK)
    smaller = edit.call(aten._to_copy.default, smaller, dtype=torch.float32, mark=MARK)
    edit.call(aten.copy_.default, factor, edit.call(aten.where.self, overflow, smaller, larger, mark=MARK), mark=MARK)
    ends = edit.call(aten.logical_or.default, overflow, grows, mark=MARK)
    edit.call(
        aten.copy_.default,
        good,
        edit.call(aten.mul.Tensor, row, edit.call(aten.logical_not.default, ends, mark=MARK), mark=MARK),
        mark=MARK,
    )
