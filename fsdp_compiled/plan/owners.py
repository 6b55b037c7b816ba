"""Deals out to ranks, by cost, the parameters whose update needs the whole of them.

    costs 9 4 4 1 on two ranks  ->  0 1 1 1        9, and 4 + 4 + 1

The costliest goes first, to the rank that has the least (longest processing time first, Graham 1969): no rank has more
than 4/3 of what the best division gives the busiest one.

What an owner has already is not sent to it. So the parameters of a buffer are laid out with few of them cut where one
rank's slice ends, and each goes to the rank that has the most of it, where that gives no rank more to do:

    sizes 4 4 3 1 on two ranks     4444 44 | 44 333 1       as given: the second is cut
    as they are laid out           4444 1 3 | 33 4444       the third alone is

`rounds` is the order in which owners update what they own, so that messages travel while they compute:

    one round     to owners ==== | step on all             | back ==
    in rounds     step on what its owner has, some | step on what came | step on the rest | word
                  to owners ============           |                   | back ========

What its owner has all of is in no message: it is updated first, and last, and what is sent in between, in one chunk or
in several. That is the same on every rank, and chosen by what each takes on the rough figures of `hardware`. Whether
all went well is said at the end, and nothing that was sent is written before: in the last message back, or where the
last round sends none, in one of its own, which is what rounds cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp_compiled.plan.hardware import Cluster


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


FLOPS = 30  # of Newton-Schulz's five steps, for each of `owners.update_cost`
CHUNKS = (1, 2, 4)  # of what is sent
BEFORE = 2 / 3  # of what is not: gradients and parameters go to owners, parameters alone come back


class Update(NamedTuple):
    """Of one parameter: who makes it, what it costs, the bytes of it that the others have."""

    owner: int
    cost: float
    sent: float


def rounds(updates: Sequence[Update], machine: Cluster, ranks: int, several: bool) -> list[list[int]]:
    """The places of the updates that are made in each round, the same on every rank; in one, or perhaps ``several``."""
    everything = list(range(len(updates)))
    local = [place for place in everything if not updates[place].sent]
    others = [place for place in everything if updates[place].sent]
    before, after = _parts(updates, local, (BEFORE, 1.0))
    found = [[everything]]
    for chunks in CHUNKS if others and several else ():
        sent = _parts(updates, others, [(chunk + 1) / chunks for chunk in range(chunks)])
        found.append([row for row in (before, *sent, after) if row])
    return min(found, key=lambda one: (_seconds(one, updates, machine, ranks), len(one)))


def _parts(updates: Sequence[Update], places: Sequence[int], ends: Sequence[float]) -> list[list[int]]:
    """Each owner's, in order, so that parts end at these of the cost of all."""
    total = dict.fromkeys((updates[place].owner for place in places), 0.0)
    for place in places:
        total[updates[place].owner] += updates[place].cost
    done = dict.fromkeys(total, 0.0)
    found: list[list[int]] = [[] for _ in ends]
    for place in places:
        owner, cost, _ = updates[place]
        middle = (done[owner] + cost / 2) / (total[owner] or 1.0)
        done[owner] += cost
        found[next(index for index, end in enumerate(ends) if middle <= end or end == ends[-1])].append(place)
    return found


def _seconds(order: Sequence[Sequence[int]], updates: Sequence[Update], machine: Cluster, ranks: int) -> float:
    """Until the last word is there, of a rank that has a mean part of everything."""
    latency, rate = machine.wait(ranks), machine.link(ranks)
    sent = [sum(updates[place].sent for place in row) / ranks for row in order]
    compute = [
        sum(updates[place].cost for place in row) / ranks * FLOPS / machine.rate(torch.bfloat16) for row in order
    ]
    wire = now = 0.0
    there = []
    for nbytes in sent:
        wire += (latency + 2 * nbytes / rate) if nbytes else 0.0
        there.append(wire if nbytes else 0.0)
    for arrived, seconds, nbytes in zip(there, compute, sent, strict=True):
        now = max(now, arrived) + seconds
        if nbytes:
            wire = max(wire, now) + latency + nbytes / rate
    return max(now, wire) + (0.0 if sent[-1] else latency)
