"""Whether a traced update keeps every element where it is: each from its own gradient and state alone.

Only such an update may run on slices of flat buffers. That is read off the operators: they are pointwise by their tag,
or known to move nothing, or work on single numbers.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fsdp_compiled.optim.twin import Refused, Untraceable

aten = torch.ops.aten

# Operators without the pointwise tag that still keep every element where it is.
_KEEP_PLACES = (
    aten.copy_.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.detach.default,
    aten.alias.default,
    aten.view_as.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.index_put_.default,  # x[mask] = number
    aten.index_put.default,
    aten.maximum.out,
    aten.minimum.out,
    aten.masked_fill.Scalar,
    aten.masked_fill_.Scalar,
    aten.lift_fresh_copy.default,
)


def _is_pointwise(target: torch._ops.OpOverload) -> bool:
    """By its tag, or that of the operator that it is the in-place form of."""
    if torch.Tag.pointwise in target.tags:
        return True
    packet, name = str(target).split(".")[1], target._overloadname
    plain = getattr(aten, packet.rstrip("_"), None) if packet.endswith("_") else None
    return torch.Tag.pointwise in getattr(getattr(plain, name, None), "tags", ())


def keeps_places(target: torch._ops.OpOverload) -> bool:
    """Whether an operator on tensors of one shape keeps every element where it is."""
    return target in _KEEP_PLACES or _is_pointwise(target)


def check_elementwise(graph: fx.Graph, shape: tuple[int, ...]) -> None:
    """Raises `Refused` for an operator that may mix the elements of a parameter of this shape, or draws numbers."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise Untraceable(f"its step closes over {node.target}")
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise Refused(f"its step draws random numbers ({node.target})")
        values = [source.meta["val"] for source in node.all_input_nodes]
        values += [node.meta["val"]] if isinstance(node.meta.get("val"), torch.Tensor) else []
        shapes = {tuple(value.shape) for value in values if isinstance(value, torch.Tensor)}
        if shapes <= {(), (1,)}:
            continue
        if not keeps_places(node.target):
            raise Refused(f"its step uses {node.target}, which does not keep every element where it is")
        if odd := [list(size) for size in shapes if size not in ((), (1,), shape)]:
            raise Refused(f"its step makes a tensor of shape {odd[0]} for a parameter of shape {list(shape)}")
        made = node.meta.get("val")
        if isinstance(made, torch.Tensor) and tuple(made.shape) in ((), (1,)) and math.prod(shape) != 1:
            raise Refused(f"its step makes one number of a parameter's elements ({node.target})")
