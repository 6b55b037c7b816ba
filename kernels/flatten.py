"""Flatten and scale: a unit's gradients -> one flat, padded buffer, in one launch.

    before                                      after

    d_weight: bfloat16[64, 48], transposed      flat: float32[3200] = d_weight d_bias 0 0 ... 0, each times scale
    d_bias: bfloat16[48]
    scale: float32[]

Every element is read once and written once. Contiguous gradients are copied 16 bytes at a time by each thread; a
transposed one by tiles, which the compiler turns around in shared memory so that loads and stores both run along
memory; any other (stride 0, rows of something wider) by working out each element's address from constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fsdp_compiled.kernels.launch import Launch, located, of, pick, triton_dtype
from fsdp_compiled.kernels.layout import TILE, flat_groups
from fsdp_compiled.kernels.reference import compute_dtype

BLOCK = 4096


@triton.jit
def _move(source, target, readable, writable, scale, COMPUTE: tl.constexpr):
    """Copies what is readable, and zeros to the rest of what is writable; None: all of it."""
    values = tl.load(source, mask=readable)
    if scale is not None:
        values = values.to(COMPUTE) * tl.load(scale).to(COMPUTE)
    values = values.to(target.dtype.scalar.element_ty)
    if readable is not None:
        values = tl.where(readable, values, 0.0)
    tl.store(target, values, mask=writable)


@triton.jit
def strided_offsets(index, SHAPE: tl.constexpr, STRIDE: tl.constexpr):
    """Where the elements with these flat indices are in a tensor of this shape and these strides."""
    found = index * 0
    for back in tl.static_range(1, len(SHAPE) + 1):
        found += (index % SHAPE[len(SHAPE) - back]) * STRIDE[len(SHAPE) - back]
        index = index // SHAPE[len(SHAPE) - back]
    return found


@triton.jit
def tile_corner(
    tile, SHAPE: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, OUTER: tl.constexpr, TILE: tl.constexpr
):
    """Of this tile: its first row, along ``DIM``, and column, along the last dim, and where its matrix begins."""
    ACROSS: tl.constexpr = (SHAPE[len(SHAPE) - 1] + TILE - 1) // TILE
    DOWN: tl.constexpr = (SHAPE[DIM] + TILE - 1) // TILE
    column = (tile % ACROSS) * TILE
    row = (tile // ACROSS % DOWN) * TILE
    rest = tile // (ACROSS * DOWN)
    begin = rest * 0
    for back in tl.static_range(1, len(OUTER) + 1):
        begin += (rest % SHAPE[OUTER[len(OUTER) - back]]) * STRIDE[OUTER[len(OUTER) - back]]
        rest = rest // SHAPE[OUTER[len(OUTER) - back]]
    return row, column, begin


@triton.jit
def _fill_by_tiles(
    source,
    out,
    scale,
    program,
    GROUPS: tl.constexpr,
    g: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    STARTS: tl.constexpr = of(GROUPS, g, "starts")
    OFFSETS: tl.constexpr = of(GROUPS, g, "offsets")
    SHAPE: tl.constexpr = of(GROUPS, g, "shape")
    STRIDE: tl.constexpr = of(GROUPS, g, "stride")
    PLACES: tl.constexpr = of(GROUPS, g, "places")
    OUTER: tl.constexpr = of(GROUPS, g, "outer")
    DIM: tl.constexpr = of(GROUPS, g, "tile")
    LAST: tl.constexpr = len(SHAPE) - 1
    tile = (program - STARTS[0]).to(tl.int64)
    row, column, begin = tile_corner(tile, SHAPE, STRIDE, DIM, OUTER, TILE)
    _, _, place = tile_corner(tile, SHAPE, PLACES, DIM, OUTER, TILE)
    rows = row + tl.arange(0, TILE)[:, None]
    columns = column + tl.arange(0, TILE)[None, :]
    read = source + begin + rows + columns * STRIDE[LAST]
    write = out + OFFSETS[0] + place + rows * PLACES[DIM] + columns
    if (row + TILE <= SHAPE[DIM]) & (column + TILE <= SHAPE[LAST]):
        _move(read, write, None, None, scale, COMPUTE)
    else:
        inside = (rows < SHAPE[DIM]) & (columns < SHAPE[LAST])
        _move(read, write, inside, inside, scale, COMPUTE)


@triton.jit
def _fill(
    sources,
    out,
    scale,
    program,
    GROUPS: tl.constexpr,
    g: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    STARTS: tl.constexpr = of(GROUPS, g, "starts")
    COUNT: tl.constexpr = of(GROUPS, g, "count")
    SHAPE: tl.constexpr = of(GROUPS, g, "shape")
    STRIDE: tl.constexpr = of(GROUPS, g, "stride")
    source = pick(sources, STARTS, program, 0, COUNT)
    begin, offset, size, room = located(GROUPS, g, program, BLOCK)
    index = begin + tl.arange(0, BLOCK)
    write = out + (offset + begin) + tl.arange(0, BLOCK)
    if len(SHAPE) == 0:
        read = source + begin + tl.arange(0, BLOCK)
    elif of(GROUPS, g, "wide"):
        read = source + strided_offsets(index, SHAPE, STRIDE)
    else:
        read = source + strided_offsets(index.to(tl.int32), SHAPE, STRIDE)
    if begin + BLOCK <= size:
        _move(read, write, None, None, scale, COMPUTE)
    else:
        _move(read, write, index < size, index < room, scale, COMPUTE)


@triton.jit
def _group(
    sources,
    out,
    scale,
    program,
    GROUPS: tl.constexpr,
    g: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    STARTS: tl.constexpr = of(GROUPS, g, "starts")
    COUNT: tl.constexpr = of(GROUPS, g, "count")
    if (program >= STARTS[0]) & (program < STARTS[COUNT]):
        if of(GROUPS, g, "tile") >= 0:
            _fill_by_tiles(sources[0], out, scale, program, GROUPS, g, TILE, COMPUTE)
        else:
            _fill(sources, out, scale, program, GROUPS, g, BLOCK, COMPUTE)


@triton.jit
def _kernel(sources, out, scale, GROUPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr):
    program = tl.program_id(0)
    for g in tl.static_range(len(sources)):
        _group(sources[g], out, scale, program, GROUPS, g, BLOCK, TILE, COMPUTE)


def launches(
    out: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: torch.Tensor | None = None,
    kept: Sequence[int] = (),
) -> list[Launch]:
    """Together they fill all of ``out`` but for the stretches that are ``kept``."""
    shared = {"out": out, "scale": scale, "BLOCK": BLOCK, "TILE": TILE}
    compute = triton_dtype(compute_dtype(out, *gradients))
    return [
        Launch(_kernel, programs, {"sources": sources, **shared, "GROUPS": groups, "COMPUTE": compute})
        for groups, sources, programs in flat_groups(gradients, offsets, out, BLOCK, kept)
    ]


def flatten(
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `fsdp_compiled.kernels.reference.flatten`."""
    out = gradients[0].new_empty(numel, dtype=dtype)
    for launch in launches(out, gradients, offsets, scale):
        launch.run(out.device)
    return out


def flatten_into(
    flat: torch.Tensor, gradients: Sequence[torch.Tensor], offsets: Sequence[int], kept: Sequence[int]
) -> None:
    """As `fsdp_compiled.kernels.reference.flatten_into`."""
    for launch in launches(flat, gradients, offsets, kept=kept):
        launch.run(flat.device)
