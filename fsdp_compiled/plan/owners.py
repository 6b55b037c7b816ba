"""Which rank updates which parameter, where an update needs the whole of it: matrices are dealt out by cost.

    costs 9 4 4 1 on two ranks  ->  0 1 1 1        9, and 4 + 4 + 1

The costliest goes first, to the rank that has the least (longest processing time first, Graham 1969): no rank has more
than 4/3 of what the best division gives the busiest one.
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


def dealt(costs: Sequence[float], ranks: int) -> list[int]:
    """Who has each, so that all have about as much to do."""
    load = [0.0] * ranks
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        found[index] = min(range(ranks), key=load.__getitem__)
        load[found[index]] += costs[index]
    return found
