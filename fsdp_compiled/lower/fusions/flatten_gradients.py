"""Flattens, casts and divides a unit's gradients in one pass over memory.

before                                            after

d_up' = reshape(d_up, [4096])                     flat = flatten([d_up, d_bias], [0, 4096], 4224, bfloat16)
flat = cat([d_up', d_bias, zeros])
flat' = _to_copy(flat, dtype=bfloat16)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def flatten_gradients(program: Program, plan: Plan) -> Program:
    """What `reduce` made to flatten each buffer's gradients, as one operator."""
    edit = Edit(program)
    for node in edit.graph.find_nodes(op="call_function", target=aten.cat.default):
        if role_of(node) == "flatten":
            _fuse(edit, node, plan)
    return edit.done("flatten_gradients")


def _fuse(edit: Edit, cat: fx.Node, plan: Plan) -> None:
    sources, places, filled = [], [], 0
    for part in cat.args[0]:  # type: ignore[union-attr]
        laid = role_of(part) == "flatten"
        if not (laid and part.target is aten.full.default):  # zeros: the buffer's padding
            sources.append(part.args[0] if laid and part.target is aten.reshape.default else part)
            places.append(filled)
        filled += part.meta["val"].numel()
    if not sources:
        return
    *_, flat = (cat, *_after(cat))
    divisor = next((node.args[1] for node in _after(cat) if node.target is aten.div.Tensor), None)
    mark = cat.meta["mark"]
    with edit.at(flat, flat.meta["phase"]):
        scale = None
        if divisor is not None:
            options = {"dtype": torch.float32, "device": plan.device}
            scale = edit.call(aten.full.default, [], 1 / divisor, mark=mark, **options)  # type: ignore[operator]
        fused = edit.call(operators.flatten.default, sources, places, filled, flat.meta["val"].dtype, scale, mark=mark)
    flat.replace_all_uses_with(fused)


def _after(cat: fx.Node) -> Iterator[fx.Node]:
    """The cast and the division that follow, if nothing else reads what is cast and divided."""
    node = cat
    for role, target in (("flatten", aten._to_copy.default), ("scale", aten.div.Tensor)):
        (user, *others) = node.users
        if not others and role_of(user) == role and user.target is target:
            node = user
            yield node
