"""Which sizes of the batch change between calls: learned from the programs that were made, under ``dynamic="auto"``.

    step (float32[8, 6])       program 1, for 8 rows
    step (float32[5, 6])       program 2, for every number of rows: they have changed
    step (float32[7, 6])       program 2
    step (float32[8, 6])       program 1, still, which knows its size
    step (float32[8, 9])       program 3, for every number of rows and columns

As `torch.compile` does it. What is learned comes from programs alone, and ranks have the same, so that all of them
decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_compiled.capture.captured import batch_tensors
from fsdp_compiled.capture.dynamic_shapes import layout, sizes_of, stay_open
from fsdp_compiled.ir.program import Program
from fsdp_compiled.runtime.programs.request import Request

Dims = tuple[int, ...]
KEPT = 256  # kinds of calls that are remembered


@dataclass
class _Seen:
    """Of calls that differ in sizes alone."""

    last: list[torch.Tensor]  # the tensors of the last one that a program was made for, without memory
    moving: list[Dims] = field(default_factory=list)  # the dims that programs were made for, the newest last
    fixed: bool = False  # whether no program can serve several sizes


class MovingSizes:
    """What is known of the sizes of one model's calls."""

    def __init__(self) -> None:
        self._seen: dict[Any, _Seen] = {}  # by all that calls have but their sizes

    def known(self, request: Request) -> Sequence[Dims]:
        """The dims that there are programs for, of calls like this one, the newest first."""
        return () if (seen := self._seen.get(request.but_sizes)) is None else seen.moving[::-1]

    def changed(self, request: Request) -> Dims:
        """The dims that a program for this call should leave open; none: it is for these sizes."""
        seen = self._seen.get(request.but_sizes)
        if seen is None or seen.fixed:
            return ()
        pairs = list(zip(seen.last, request.tensors, strict=True))
        different = {dim for one, other in pairs for dim in range(one.dim()) if one.shape[dim] != other.shape[dim]}
        for dims in dict.fromkeys(tuple(sorted(different.union(known))) for known in (*seen.moving[::-1], ())):
            if dims and _alike(pairs, dims):
                return dims
        return ()

    def made(self, request: Request, program: Program, several: bool) -> None:
        """A program was made for this call; ``several``: one for several sizes was asked for."""
        dims = tuple(request.sizes)
        given = batch_tensors(request.batch, request.named)
        fixed = several and not (dims and stay_open(program, given, request.sizes))
        last = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in request.tensors]
        seen = self._seen.pop(request.but_sizes, None) or _Seen(last)
        self._seen[request.but_sizes] = seen
        seen.last, seen.fixed = last, seen.fixed or fixed
        if dims and dims not in seen.moving:
            seen.moving.append(dims)
        if len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]


def _alike(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], dims: Dims) -> bool:
    """Whether the two calls are one where these dims move."""
    sizes = [sizes_of(dims, tensors) for tensors in zip(*pairs, strict=True)]
    return all(len(one) == len(dims) for one in sizes) and all(
        layout(one, sizes[0])[:3] == layout(other, sizes[1])[:3] for one, other in pairs
    )
