"""Assigns parameters that must be updated whole to ranks, by cost.

    costs 9 4 4 1 on two ranks  ->  0 1 1 1        9, and 4 + 4 + 1

The costliest parameter goes first, to the rank with the least work (longest processing time first, Graham 1969): no
rank has more than 4/3 of what the best division gives the busiest one.

An owner need not be sent the elements it already has. So a buffer's parameters are laid out so that few of them are cut
at the end of a rank's slice. Each parameter goes to the rank that has the most of it, unless that gives the busiest
rank more work:

    sizes 4 4 3 1 on two ranks     4444 44 | 44 333 1       as given: the second is cut
    as they are laid out           4444 1 3 | 33 4444       the third alone is
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def update_cost(shape: Sequence[int]) -> float:
    """The cost of an update, in a unit of its own: of products of a matrix with itself, along its shorter side.

    This is the cost of Newton-Schulz, and roughly of inverse roots; other shapes are updated element by element.
    """
    if len(shape) < 2:
        return float(math.prod(shape) or 1)
    rows, columns = shape[0], math.prod(shape[1:])
    return float(rows * columns * min(rows, columns) or 1)


def dealt(costs: Sequence[float], ranks: int, held: Sequence[Sequence[int]] | None = None) -> list[int]:
    """The owner of each parameter, so that all have about as much work. ``held``: how much of each is on every rank."""
    found, most = _dealt(costs, ranks, [[0] * ranks] * len(costs), math.inf)
    if held is None:
        return found
    near, load = _dealt(costs, ranks, held, most)
    return near if load <= most else found


def _dealt(costs: Sequence[float], ranks: int, held: Sequence[Sequence[int]], most: float) -> tuple[list[int], float]:
    """The owner of each parameter, and the busiest rank's work. Among ranks whose work stays within ``most``, the owner
    is the one that holds most of the parameter."""
    load = [0.0] * ranks
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):

        def preference(rank: int, index: int = index) -> tuple[bool, int, float]:
            return load[rank] + costs[index] > most, -held[index][rank], load[rank]

        found[index] = min(range(ranks), key=preference)
        load[found[index]] += costs[index]
    return found, max(load)


def laid_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """An order in which the ends of the ranks' equal slices cut few parameters, and cut those near one of their ends.

    A slice is filled with the largest parameter that fits into the rest of it. If none fits, it cuts the one whose
    smaller part is the smallest.
    """
    each = sum(sizes) / ranks
    left = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    order: list[int] = []
    place = 0
    while left:
        room = each - place % each if each else math.inf
        following = next((index for index in left if sizes[index] <= room), None)
        if following is None:
            following = min(left, key=lambda index: (min(room, sizes[index] - room), sizes[index]))
        left.remove(following)
        order.append(following)
        place += sizes[following]
    return order
