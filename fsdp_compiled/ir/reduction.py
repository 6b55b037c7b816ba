"""How a flat gradient becomes this rank's part of the mean over the ranks: the calls of one input, in their order.

    [world * n], float32, zero3, two replicas:   reduce_scatter "avg" over shard, wait, all_reduce "avg" over replicate,
                                                 wait -> [n]

Means are taken on the wire, but for float16, whose largest number is 65504: there a part of the division comes before
the sum and the rest after it, as in FSDP2. The pass `reduce` writes these calls into a program; what a loop of the
user's own adds up without synchronisation is no program's, and goes through the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_compiled.ir.nodes import Role
from fsdp_compiled.plan.plan import Axis, Buffer, Plan

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Call:
    """``target(value, *arguments, axis, **options)``, the axis where there is one; ``role``: of the node's mark."""

    role: Role
    target: torch._ops.OpOverload
    arguments: tuple[Any, ...] = ()
    axis: Axis | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def reduction(buffer: Buffer, dtype: torch.dtype, plan: Plan) -> list[Call]:
    """Of a flat gradient of this dtype, whole on each rank; what comes of it has the buffer's."""
    before, after = plan.divisors if dtype == torch.float16 else (1, 1)
    how = "sum" if dtype == torch.float16 else "avg"
    wait = Call("wait", c10d.wait_tensor.default)
    calls = []
    if before != 1:
        calls.append(Call("scale", aten.div.Tensor, (before,)))
    if plan.shard > 1 and plan.placement.gradient:
        calls += [Call("reduce", c10d.reduce_scatter_tensor.default, (how, plan.shard), "shard"), wait]
    elif plan.shard > 1:
        calls += [Call("reduce", c10d.all_reduce.default, (how,), "shard"), wait]
    if plan.replicate > 1:
        calls += [Call("reduce", c10d.all_reduce.default, (how,), "replicate"), wait]
    if after != 1:
        calls.append(Call("scale", aten.div.Tensor, (after,)))
    if dtype != buffer.dtype:
        calls.append(Call("cast", aten._to_copy.default, options={"dtype": buffer.dtype}))
    return calls
