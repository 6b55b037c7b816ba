"""Pack and unpack: numbers as one byte each with a scale for every 128, for the wire (`reference.pack` has the form).

    pack        values [numel] -> rows of bytes, one for each rank that they go to
    unpack      rows of bytes, one of each rank -> values [numel], one row after the other
    combine     the same -> the sum, or the mean, of the rows

Every element is read once and written once; a thread loads or stores what is not packed 16 bytes at a time. One
program works on `BLOCK` elements of a row. fp8 is made and read bit by bit, so that it
runs on GPUs that have no such numbers, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdp_compiled.kernels.launch import Launch
from fsdp_compiled.kernels.layout import ceil_div
from fsdp_compiled.kernels.reference import LARGEST, SCALED, row_of

BLOCK = 2048


@triton.jit
def _folded(x, SHIFT: tl.constexpr):
    return x ^ (x >> SHIFT)


@triton.jit
def _mixed(x):
    x = _folded(x, 16) * tl.full((), 0x7FEB352D, tl.uint32)
    x = _folded(x, 15) * tl.full((), 0x846CA68B, tl.uint32)
    return _folded(x, 16)


@triton.jit
def _noise(place, seed, salt):
    """As `reference.noise`."""
    value = tl.load(seed)
    key = _mixed((value + salt).to(tl.uint32))
    key = _mixed(key ^ (value >> 32).to(tl.uint32))
    x = _mixed(place.to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32) + key)
    return (x >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _encoded(values, up, FP8: tl.constexpr):
    """The bytes of what is between the largest number of the format and its negative."""
    if FP8:
        bits = values.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 255, 121)
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        rounded = tl.minimum(tl.maximum(tl.floor(values / step + up) * step, -448.0), 448.0)
        size = tl.abs(rounded)
        bits = size.to(tl.int32, bitcast=True)
        code = (((bits >> 23) - 120) << 3) | ((bits >> 20) & 7)
        code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), code)
        code = tl.where(rounded < 0.0, code | 128, code)
    else:
        code = tl.minimum(tl.maximum(tl.floor(values + up), -127.0), 127.0).to(tl.int32)
    return code.to(tl.uint8)


@triton.jit
def _decoded(code, FP8: tl.constexpr):
    if FP8:
        code = code.to(tl.int32)
        exponent = (code >> 3) & 15
        size = (((exponent + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
        size = tl.where(exponent == 0, (code & 7).to(tl.float32) * 0.001953125, size)
        return tl.where(code >= 128, -size, size)
    else:
        return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _places(chunk, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """Of this chunk of a row: its blocks, and its elements, ``[blocks, SCALED]``."""
    blocks = chunk * (BLOCK // SCALED) + tl.arange(0, BLOCK // SCALED)
    return blocks, chunk * BLOCK + tl.arange(0, BLOCK // SCALED)[:, None] * SCALED + tl.arange(0, SCALED)[None, :]


@triton.jit
def _pack(
    values,
    packed,
    scales,
    seed,
    salt,
    numel,
    row,
    length,
    size,
    across,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    FP8: tl.constexpr,
):
    program = tl.program_id(0)
    number = (program // across).to(tl.int64)
    blocks, index = _places(program % across, BLOCK, SCALED)
    start = number * row
    value = tl.load(values + start + index, mask=(index < row) & (index < numel - start), other=0.0).to(tl.float32)
    large = tl.abs(value)
    scale = tl.div_rn(tl.max(tl.where(large == large, large, float("inf")), 1), LARGEST)
    value = tl.div_rn(value, tl.where(scale == 0.0, float("inf"), scale)[:, None] + tl.zeros_like(value))
    value = tl.where(value == value, value, 0.0)
    if seed is None:
        up = 0.5
    else:
        up = _noise(start + index, seed, salt)
    begin = number * size
    tl.store(packed + begin + index, _encoded(value, up, FP8), mask=index < length)
    tl.store(scales + (begin + length) // 4 + blocks, scale, mask=blocks < length // SCALED)


@triton.jit
def _unpack(
    values,
    packed,
    scales,
    numel,
    row,
    length,
    size,
    across,
    rows,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    SUM: tl.constexpr,
    MEAN: tl.constexpr,
):
    program = tl.program_id(0)
    blocks, index = _places(program % across, BLOCK, SCALED)
    if SUM:
        start = tl.full((), 0, tl.int64)
        total = _row(packed, scales, start, index, blocks, length, size, SCALED, FP8)
        for number in range(1, rows):
            total += _row(packed, scales, start + number, index, blocks, length, size, SCALED, FP8)
        if MEAN:
            total = total / rows
    else:
        start = (program // across).to(tl.int64)
        total = _row(packed, scales, start, index, blocks, length, size, SCALED, FP8)
        start = start * row
    inside = (index < row) & (index < numel - start)
    tl.store(values + start + index, total.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _row(packed, scales, number, index, blocks, length, size, SCALED: tl.constexpr, FP8: tl.constexpr):
    begin = number * size
    code = tl.load(packed + begin + index, mask=index < length, other=0)
    scale = tl.load(scales + (begin + length) // 4 + blocks, mask=blocks < length // SCALED, other=0.0)
    return _decoded(code, FP8) * scale[:, None]


def _sizes(numel: int, rows: int) -> tuple[dict[str, int], int]:
    """What both kernels are told of rows, and how many programs a row takes."""
    row, size = row_of(numel, rows)
    length = size // (SCALED + 4) * SCALED
    across = ceil_div(length, BLOCK)
    sizes = {"numel": numel, "row": row, "length": length, "size": size, "across": across}
    return {**sizes, "BLOCK": BLOCK, "SCALED": SCALED}, across


def pack_launch(
    values: torch.Tensor, packed: torch.Tensor, rows: int, seed: torch.Tensor | None, salt: int, form: str
) -> Launch:
    sizes, across = _sizes(values.numel(), rows)
    tensors = {"values": values, "packed": packed, "scales": packed.view(torch.float32), "seed": seed, "salt": salt}
    return Launch(_pack, rows * across, {**tensors, **sizes, "LARGEST": LARGEST[form], "FP8": form == "fp8"})


def unpack_launch(
    packed: torch.Tensor, values: torch.Tensor, rows: int, form: str, adds: bool = False, mean: bool = False
) -> Launch:
    sizes, across = _sizes(values.numel(), 1 if adds else rows)
    tensors = {"values": values, "packed": packed, "scales": packed.view(torch.float32), "rows": rows}
    options = {"FP8": form == "fp8", "SUM": adds, "MEAN": mean}
    return Launch(_unpack, across if adds else rows * across, {**tensors, **sizes, **options})


def pack(
    values: torch.Tensor, rows: int, seed: torch.Tensor | None = None, salt: int = 0, *, form: str
) -> torch.Tensor:
    """As `fsdp_compiled.kernels.reference.pack`."""
    packed = values.new_empty(rows * row_of(values.numel(), rows)[1], dtype=torch.uint8)
    pack_launch(values, packed, rows, seed, salt, form).run(values.device)
    return packed


def unpack(packed: torch.Tensor, rows: int, numel: int, dtype: torch.dtype, *, form: str) -> torch.Tensor:
    """As `fsdp_compiled.kernels.reference.unpack`."""
    values = packed.new_empty(numel, dtype=dtype)
    unpack_launch(packed, values, rows, form).run(packed.device)
    return values


def combine(packed: torch.Tensor, rows: int, numel: int, dtype: torch.dtype, *, form: str, mean: bool) -> torch.Tensor:
    """As `fsdp_compiled.kernels.reference.combine`."""
    values = packed.new_empty(numel, dtype=dtype)
    unpack_launch(packed, values, rows, form, adds=True, mean=mean).run(packed.device)
    return values
