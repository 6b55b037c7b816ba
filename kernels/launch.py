"""A launch as a value: a kernel, how many programs, and every argument by name; and what all kernels share.

The tests compile for GPUs that are not there, and run in Triton's interpreter, exactly the launches that operators
make.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fsdp_compiled.kernels.layout import PLANS, Group


@lru_cache(PLANS)
def group_constants(group: Group) -> tuple[tuple[str, Any], ...]:
    """A group as Triton is given it: pairs of a name and a value.

    Its text is a part of the key under which Triton keeps a compiled kernel, and its hooks write it as JSON. So all
    that a kernel reads stands in it, what is worked out (``DERIVED``) too: a property, read while the kernel compiles,
    would change without the key, and an old kernel would run.
    """
    names = (*(entry.name for entry in fields(group)), *group.DERIVED)
    return tuple((name, getattr(group, name)) for name in names)


@dataclass(frozen=True)
class Launch:
    """``arguments``: of the kernel, by name; ``GROUPS`` and ``OPTIONS`` are constants."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int = 4

    @property
    def given(self) -> dict[str, Any]:
        """The arguments as the kernel gets them."""
        if "GROUPS" not in self.arguments:
            return self.arguments
        return self.arguments | {"GROUPS": tuple(map(group_constants, self.arguments["GROUPS"]))}

    def run(self, device: torch.device) -> None:
        if self.programs:
            with torch.cuda.device(device if device.type == "cuda" else -1):
                self.kernel[(self.programs,)](**self.given, num_warps=self.warps)


def triton_dtype(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


@triton.constexpr_function
def of(groups, index, name):
    """A constant of one of a launch's groups."""
    return dict(groups[index])[name]


@triton.jit
def pick(tensors, STARTS: tl.constexpr, program, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The tensor that this program works on: the last whose first program is not after it."""
    if HIGH - LOW == 1:
        return tensors[LOW]
    else:
        MIDDLE: tl.constexpr = (LOW + HIGH) // 2
        if program < STARTS[MIDDLE]:
            found = pick(tensors, STARTS, program, LOW, MIDDLE)
        else:
            found = pick(tensors, STARTS, program, MIDDLE, HIGH)
        return found


@triton.jit
def place(
    STARTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SIZES: tl.constexpr,
    STOPS: tl.constexpr,
    program,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Of this program's piece: its first program, where it begins, how much its source has, how much it fills."""
    if HIGH - LOW == 1:
        start = tl.full((), STARTS[LOW], tl.int32)
        offset = tl.full((), OFFSETS[LOW], tl.int64)
        size = tl.full((), SIZES[LOW], tl.int64)
        room = tl.full((), STOPS[LOW] - OFFSETS[LOW], tl.int64)
    else:
        MIDDLE: tl.constexpr = (LOW + HIGH) // 2
        if program < STARTS[MIDDLE]:
            start, offset, size, room = place(STARTS, OFFSETS, SIZES, STOPS, program, LOW, MIDDLE)
        else:
            start, offset, size, room = place(STARTS, OFFSETS, SIZES, STOPS, program, MIDDLE, HIGH)
    return start, offset, size, room


@triton.jit
def located(GROUPS: tl.constexpr, g: tl.constexpr, program, BLOCK: tl.constexpr):
    """Where this program's block begins in its piece, in 64 bits, and `place`'s other results."""
    STARTS: tl.constexpr = of(GROUPS, g, "starts")
    OFFSETS: tl.constexpr = of(GROUPS, g, "offsets")
    SIZES: tl.constexpr = of(GROUPS, g, "sizes")
    STOPS: tl.constexpr = of(GROUPS, g, "stops")
    COUNT: tl.constexpr = of(GROUPS, g, "count")
    start, offset, size, room = place(STARTS, OFFSETS, SIZES, STOPS, program, 0, COUNT)
    return (program - start).to(tl.int64) * BLOCK, offset, size, room
