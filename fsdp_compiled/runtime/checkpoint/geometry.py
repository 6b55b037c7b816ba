"""Where elements of a tensor, or of a part that ranks along the tp axis have, lie in the whole: as rectangles.

No cut is the whole tensor. Files hold elements of parts in the parts' own order, so that what a rank holds is one piece
of a file whichever dim was cut.

Elements ``[start, stop)`` of a tensor, in memory order, are at most ``2 * dims - 1`` rectangles.

[7, 23) of a 4 x 6 tensor          row 1 from column 1 on, rows 2 to 2, row 3 up to column 4:

    . . . . . .                    (1, 1) 1 x 5
    . a a a a a                    (2, 0) 1 x 6
    b b b b b b                    (3, 0) 1 x 5
    c c c c c .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """One of ``parts`` along ``dim``, all as large as the first: zeros that are not in the whole end the last ones
    where ``parts`` do not divide the dim."""

    dim: int
    part: int
    parts: int

    def __str__(self) -> str:
        return f"part {self.part + 1} of {self.parts} along dim {self.dim}"


def part_shape(shape: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """The shape of a part, ``[4, 6]`` -> ``[4, 3]``."""
    if cut is None:
        return tuple(shape)
    return tuple(-(-size // cut.parts) if dim == cut.dim else size for dim, size in enumerate(shape))


def part_offsets(shape: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Where in the whole a part begins, in each dim."""
    begin = [0] * len(shape)
    if cut is not None:
        begin[cut.dim] = cut.part * part_shape(shape, cut)[cut.dim]
    return tuple(begin)


def length_in_whole(shape: Sequence[int], cut: Cut) -> int:
    """How much of the whole's dim is in the part: the rest of it is zeros."""
    each = part_shape(shape, cut)[cut.dim]
    return min(max(shape[cut.dim] - cut.part * each, 0), each)


class Rectangle(NamedTuple):
    """Where it begins, how long it is in each dim, and the number of its first element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Elements ``[start, stop)`` of a contiguous tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield Rectangle((), (), start)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows [first, last) are whole
    if first > last:  # all in one row
        yield from _in_row(shape, first - 1, start - (first - 1) * inner, stop - (first - 1) * inner)
        return
    if start % inner:
        yield from _in_row(shape, first - 1, start % inner, inner)
    if last > first:
        yield Rectangle((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * inner)
    if stop % inner:
        yield from _in_row(shape, last, 0, stop % inner)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Rectangle]:
    inner = math.prod(shape[1:])
    for offsets, sizes, first in rectangles(shape[1:], start, stop):
        yield Rectangle((row, *offsets), (1, *sizes), first + row * inner)
