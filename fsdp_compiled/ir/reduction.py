"""The calls that turn one flat gradient into this rank's part of the mean over the ranks, in their order.

    [world * n], float32, zero3, two replicas:   reduce_scatter "avg" over shard, wait, all_reduce "avg" over replicate,
                                                 wait -> [n]

The collective takes the mean, except for float16, whose largest number is 65504: there part of the division comes
before the sum and the rest after it, as in FSDP2. A training loop of the user may set another factor (`Division`). The
pass `reduce` writes these calls into a program. Gradients that such a loop adds up without synchronisation are in no
program, and go through the same calls.
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
    """The calls for a flat gradient of this dtype, whole on each rank. The result has the buffer's dtype, unless the
    buffer is `hooked`: then the calls end with the last reduction."""
    factor, sums = buffer.division.factor, buffer.division.sums
    wait = Call("wait", c10d.wait_tensor.default)
    calls: list[Call] = []
    first = rest = "avg"
    if dtype == torch.float16:
        first = rest = "sum"
        before, _ = _divisors(factor or plan.world)
        if before != 1:
            calls.append(Call("scale", aten.div.Tensor, (before,)))
    elif sums:
        first = rest = "sum"
    elif factor is not None:
        first, rest = "avg" if factor == plan.shard else "sum", "sum"
        if first == "sum" and factor != 1:
            calls.append(Call("scale", aten.mul.Tensor, (1 / factor,)))
    if plan.shard > 1 and plan.placement.gradient:
        calls += [Call("reduce", c10d.reduce_scatter_tensor.default, (first, plan.shard), "shard"), wait]
    elif plan.shard > 1:
        calls += [Call("reduce", c10d.all_reduce.default, (first,), "shard"), wait]
    if plan.replicate > 1:
        calls += [Call("reduce", c10d.all_reduce.default, (rest,), "replicate"), wait]
    return calls if buffer.hooked else calls + finish(buffer, dtype, plan)


def finish(buffer: Buffer, dtype: torch.dtype, plan: Plan) -> list[Call]:
    """The calls after the last reduction."""
    factor = buffer.division.factor or plan.world
    after = _divisors(factor)[1] if dtype == torch.float16 else factor if buffer.division.sums else 1
    calls = [Call("scale", aten.div.Tensor, (after,))] if after != 1 else []
    if dtype != buffer.dtype:
        calls.append(Call("cast", aten._to_copy.default, options={"dtype": buffer.dtype}))
    return calls


def _divisors(factor: float) -> tuple[int, float]:
    """The divisors of a float16 gradient before the sum over ranks, a power of two near the root, and after it."""
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before
