"""Accumulate and measure: reduced gradients join their sums, and are measured, in one pass over memory.

    before                                      after

    total: float32[n]; part: bfloat16[n]        total += part
    scale: float32[]                            squares: float32[n / 4096] = sums of (scale * total) ** 2, by block

What is measured is what the update will see: the scale (of the loss, of microbatches) is applied there, not written
back here. Without sums to join, the parts are measured, and nothing is written.

A norm made of each program's own sum, added up afterwards in one order, is the same in every run; one added up by
atomics would differ in its last bits from run to run, and with it every clipped weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fsdp_compiled.kernels.launch import Launch, located, of, pick, triton_dtype
from fsdp_compiled.kernels.layout import list_groups
from fsdp_compiled.kernels.reference import SQUARES, compute_dtype, squares_of


@triton.jit
def count_nonfinite(values, nonfinite):
    """Adds how many of them are infinite or NaN to ``nonfinite``; integers, so in any order the same."""
    if nonfinite is not None:
        count = tl.sum((~(tl.abs(values) < float("inf"))).to(tl.int32))
        if count > 0:
            tl.atomic_add(nonfinite, count.to(nonfinite.dtype.element_ty), sem="relaxed")


@triton.jit
def _kernel(
    totals,
    parts,
    squares,
    scale,
    nonfinite,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    program = tl.program_id(0)
    STARTS: tl.constexpr = of(GROUPS, 0, "starts")
    begin, offset, size, _ = located(GROUPS, 0, program, BLOCK)
    index = tl.arange(0, BLOCK)
    part = pick(parts, STARTS, program, 0, len(parts)) + begin + index
    total = None
    if totals is not None:
        total = pick(totals, STARTS, program, 0, len(parts)) + begin + index
    if begin + BLOCK <= size:
        _add(total, part, None, squares + offset + begin // BLOCK, scale, nonfinite, COMPUTE)
    else:
        _add(total, part, begin + index < size, squares + offset + begin // BLOCK, scale, nonfinite, COMPUTE)


@triton.jit
def _add(total, part, inside, square, scale, nonfinite, COMPUTE: tl.constexpr):
    values = tl.load(part, mask=inside).to(COMPUTE)
    if total is not None:
        values = (tl.load(total, mask=inside).to(COMPUTE) + values).to(total.dtype.scalar.element_ty)
        tl.store(total, values, mask=inside)
        values = values.to(COMPUTE)
    if inside is not None:
        values = tl.where(inside, values, 0.0)
    count_nonfinite(values, nonfinite)
    if scale is not None:
        values = values * tl.load(scale).to(COMPUTE)
        if inside is not None:  # zero times an infinite scale is NaN
            values = tl.where(inside, values, 0.0)
    tl.store(square, tl.sum(values * values).to(square.dtype.element_ty))


def launches(
    totals: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    squares: torch.Tensor,
    scale: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
) -> list[Launch]:
    """One launch for each pair of dtypes, aligned or not; without ``totals`` the parts are measured."""
    found = []
    for places, group in list_groups(parts, totals, block=SQUARES, numbered=True):
        first = [tensors[places[0]] for tensors in (totals, parts) if tensors]
        arguments = {
            "totals": tuple(totals[i] for i in places) if totals else None,
            "parts": tuple(parts[i] for i in places),
            "squares": squares,
            "scale": scale,
            "nonfinite": nonfinite,
            "GROUPS": (group,),
            "BLOCK": SQUARES,
            "COMPUTE": triton_dtype(compute_dtype(*first)),
        }
        found.append(Launch(_kernel, group.starts[-1], arguments))
    return found


def accumulate(
    totals: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    scale: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `fsdp_compiled.kernels.reference.accumulate`."""
    squares = parts[0].new_empty(squares_of(parts), dtype=compute_dtype(*(totals or parts)))
    for launch in launches(totals, parts, squares, scale, nonfinite):
        launch.run(squares.device)
    return squares


def measure(
    parts: Sequence[torch.Tensor], scale: torch.Tensor | None = None, nonfinite: torch.Tensor | None = None
) -> torch.Tensor:
    """As `fsdp_compiled.kernels.reference.measure`."""
    return accumulate((), parts, scale, nonfinite)
