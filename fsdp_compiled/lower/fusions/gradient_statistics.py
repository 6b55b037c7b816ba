"""Reads each gradient once, for its sum of squares and its number of elements that are not finite.

    before                                          after

    scaled = gradient * factor                      scaled = gradient * factor
    norm(gradient, inf) is finite                   squares = measure([gradient, ...], factor, nonfinite)
    squares = norm(scaled) ** 2 + ...               squares' = sum(squares)

The operator also gets the factors on the gradient up to the measurement (1 / microbatches, 1 / loss scale), so that the
scaled gradient is never made where nothing else reads it (`optimizer_update`). Where one operator adds gradients to
sums over microbatches (`microbatch_sums`), that operator measures them:

    accumulate_([gradient], [sum])                  squares = accumulate_([gradient], [sum], factor, nonfinite)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, first, positions, purpose_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.lower.gradient_factors import product, unscaled
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
MARK = Mark("norm")


def gradient_statistics(program: Program, plan: Plan) -> Program:
    """Computes in one read what `report` and `unscale` need to know about the gradients."""
    edit = Edit(program)
    found = {purpose_of(node): node for node in edit.graph.nodes}
    if "squares" in found:
        _fuse(edit, found["squares"], found.get("nonfinite"), plan)
    return edit.done("gradient_statistics")


def _fuse(edit: Edit, squares: fx.Node, nonfinite: fx.Node | None, plan: Plan) -> None:
    gradients = dict(unscaled(norm.args[0]) for norm in _norms(squares))  # type: ignore[arg-type]
    counted = {unscaled(norm.args[0])[0] for norm in _norms(nonfinite)}  # type: ignore[arg-type]
    factors = set(gradients.values())
    if len(factors) != 1 or (nonfinite is not None and counted != set(gradients)):
        return
    order = positions(edit.graph)
    calls = [node for node in edit.graph.nodes if _adds(node, gradients)]
    joined = {total for call in calls for total in call.args[0]}
    alone = [gradient for gradient in gradients if gradient not in joined]
    begin = first([squares, *calls], order)
    count = None
    with edit.at(begin, "update"):
        if nonfinite is not None:
            count = edit.call(aten.full.default, [], 0, dtype=torch.int64, device=plan.device, mark=MARK)
        scale = product(edit, factors.pop(), begin)
    measured = []
    with edit.at(squares, "update"):
        if alone:
            measured.append(edit.call(operators.measure.default, alone, scale, count, mark=MARK))
        for call in calls:
            call.args = (*call.args[:2], scale, count)
        sums = [
            edit.call(aten.sum.dim_IntList, one, None, dtype=torch.float64, mark=MARK) for one in (*measured, *calls)
        ]
        whole = sums[0]
        for one in sums[1:]:
            whole = edit.call(aten.add.Tensor, whole, one, mark=MARK)
        if nonfinite is not None:
            nonfinite.replace_all_uses_with(edit.call(aten._to_copy.default, count, dtype=torch.float64, mark=MARK))
    squares.replace_all_uses_with(whole)


def _norms(result: fx.Node | None) -> Iterator[fx.Node]:
    """The norms of single gradients that this number was made of, in order."""
    if result is not None and result.target is aten.linalg_vector_norm.default:
        yield result
    elif result is not None:
        for source in result.all_input_nodes:
            yield from _norms(source)


def _adds(node: fx.Node, gradients: dict[fx.Node, Any]) -> bool:
    """Whether the node is the operator in which some of these gradients, and no others, join their sums."""
    return node.target is operators.accumulate_.default and set(node.args[0]) <= set(gradients)  # type: ignore[arg-type]
