"""A stretch of a tensor's elements as rectangles of the tensor, at most ``2 * dims - 1`` of them.

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
