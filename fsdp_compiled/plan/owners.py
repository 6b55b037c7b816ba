"""Deals out to ranks, by cost, the parameters whose update needs the whole of them.

    costs 9 4 4 1 on two ranks  ->  0 1 1 1        9, and 4 + 4 + 1

The costliest goes first, to the rank that has the least (longest processing time first, Graham 1969): no rank has more
than 4/3 of what the best division gives the busiest one.

What an owner has already is not sent to it. So the parameters of a buffer are laid out with few of them cut where one
rank's slice ends, and each goes to the rank that has the most of it, where that gives no rank more to do:

    sizes 4 4 3 1 on two ranks     4444 44 | 44 333 1       as given: the second is cut
    as they are laid out           4444 1 3 | 33 4444       the third alone is
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def update_cost(shape: Sequence[int]) -> float:
    """What updating it costs, in a unit of its own: products of a matrix with itself, along its shorter side.

    That is Newton-Schulz's, and by and large that of inverse roots; other shapes are updated element by element.
    """
    if len(shape) < 2:
        return float(math.prod(shape) or 1)
    rows, columns = shape[0], math.prod(shape[1:])
    return float(rows * columns * min(rows, columns) or 1)


def dealt(costs: Sequence[float], ranks: int, held: Sequence[Sequence[int]] | None = None) -> list[int]:
    """Who has each, so that all have about as much to do. ``held``: how much of each lies on every rank."""
    found, most = _dealt(costs, ranks, [[0] * ranks] * len(costs), math.inf)
    if held is None:
        return found
    near, load = _dealt(costs, ranks, held, most)
    return near if load <= most else found


def _dealt(costs: Sequence[float], ranks: int, held: Sequence[Sequence[int]], most: float) -> tuple[list[int], float]:
    """Who has each, and what the busiest has to do. Who holds the more of it goes first, if it stays at ``most``."""
    load = [0.0] * ranks
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):

        def preference(rank: int, index: int = index) -> tuple[bool, int, float]:
            return load[rank] + costs[index] > most, -held[index][rank], load[rank]

        found[index] = min(range(ranks), key=preference)
        load[found[index]] += costs[index]
    return found, max(load)


def laid_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """The order, end to end, in which the ends of the ranks' equal slices cut few of these, and those near an end.

    A slice is filled with the largest that fits into its rest. Where none does, the one is cut of which the smaller
    part is the smallest.
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
