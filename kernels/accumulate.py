"""Unscale, accumulate and measure: reduced gradients join their sums, in one pass over memory.

    before                                      after

    total: float32[n]; part: bfloat16[n]        total += scale * part
    scale: float32[]                            squares: float32[n / 4096] = sums of total * total, by block

A norm made of each program's own sum, added up afterwards in one order, is the same in every run; one added up by
atomics would differ in its last bits from run to run, and with it every clipped weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fsdp_compiled.kernels.launch import Launch, count_nonfinite, located, of, pick, triton_dtype
from fsdp_compiled.kernels.layout import by_dtype, ceil_div, list_group
from fsdp_compiled.kernels.reference import SQUARES, compute_dtype


@triton.jit
def _kernel(
    totals,
    parts,
    squares,
    scale,
    nonfinite,
    GROUPS: tl.constexpr,
    FRESH: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    program = tl.program_id(0)
    STARTS: tl.constexpr = of(GROUPS, 0, "starts")
    begin, offset, size, _ = located(GROUPS, 0, program, BLOCK)
    index = tl.arange(0, BLOCK)
    total = pick(totals, STARTS, program, 0, len(totals)) + begin + index
    part = pick(parts, STARTS, program, 0, len(totals)) + begin + index
    if begin + BLOCK <= size:
        _add(total, part, None, squares + offset + begin // BLOCK, scale, nonfinite, FRESH, COMPUTE)
    else:
        _add(total, part, begin + index < size, squares + offset + begin // BLOCK, scale, nonfinite, FRESH, COMPUTE)


@triton.jit
def _add(total, part, inside, square, scale, nonfinite, FRESH: tl.constexpr, COMPUTE: tl.constexpr):
    values = tl.load(part, mask=inside).to(COMPUTE)
    if scale is not None:
        values = values * tl.load(scale).to(COMPUTE)
    if not FRESH:
        values += tl.load(total, mask=inside).to(COMPUTE)
    values = values.to(total.dtype.scalar.element_ty)
    tl.store(total, values, mask=inside)
    values = values.to(COMPUTE)
    if inside is not None:
        values = tl.where(inside, values, 0.0)
    tl.store(square, tl.sum(values * values).to(square.dtype.element_ty))
    count_nonfinite(values, nonfinite)


def launches(
    totals: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    squares: torch.Tensor,
    scale: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
    *,
    fresh: bool,
) -> list[Launch]:
    """One launch for each pair of dtypes."""
    firsts = [0]
    for total in totals:
        firsts.append(firsts[-1] + ceil_div(total.numel(), SQUARES))
    found = []
    for places in by_dtype(totals, parts):
        group = list_group([totals[i].numel() for i in places], SQUARES, [firsts[i] for i in places])
        arguments = {
            "totals": tuple(totals[i] for i in places),
            "parts": tuple(parts[i] for i in places),
            "squares": squares,
            "scale": scale,
            "nonfinite": nonfinite,
            "GROUPS": (group,),
            "FRESH": fresh,
            "BLOCK": SQUARES,
            "COMPUTE": triton_dtype(compute_dtype(totals[places[0]], parts[places[0]])),
        }
        found.append(Launch(_kernel, group.starts[-1], arguments))
    return found


def accumulate(
    totals: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    scale: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
    *,
    fresh: bool = False,
) -> torch.Tensor:
    """As `fsdp_compiled.kernels.reference.accumulate`."""
    size = sum(ceil_div(total.numel(), SQUARES) for total in totals)
    squares = totals[0].new_empty(size, dtype=compute_dtype(*totals))
    for launch in launches(totals, parts, squares, scale, nonfinite, fresh=fresh):
        launch.run(squares.device)
    return squares
