"""Assigns parameters that must be updated whole to ranks, by cost.

    costs 9 4 4 1 on two ranks  ->  0 1 1 1        9, and 4 + 4 + 1

The costliest parameter goes first, to the rank with the least work (longest processing time first, Graham 1969): no
rank has more than 4/3 of what the best division gives the busiest one.

An owner need not be sent the elements it already has. So a buffer's parameters are laid out so that few of them are cut
at the end of a rank's slice. Each parameter goes to the rank that has the most of it, unless that gives the busiest
rank more work:

    sizes 4 4 3 1 on two ranks     4444 44 | 44 333 1       as given: the second is cut
    as they are laid out           4444 1 3 | 33 4444       the third alone is

`rounds` is the order in which owners update their parameters, so that messages travel while they compute:

    one round     to owners ==== | step on all             | back ==
    in rounds     step on what its owner has, some | step on what came | step on the rest | word
                  to owners ============           |                   | back ========

A parameter that lies entirely on its owner needs no message: such parameters are updated first and last. Those that are
sent are updated in between, in one chunk or in several. The choice is the same on every rank, by estimated times from
the rough figures of `hardware`. Whether all went well is said at the end, and nothing that was sent is written before.
It is said in the last message back or, if the last round sends none, in a message of its own: the price of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp_compiled.plan.hardware import Cluster


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


FLOPS = 30  # of Newton-Schulz's five steps, for each unit of `owners.update_cost`
CHUNKS = (1, 2, 4)  # how many chunks the sent parameters may be updated in
BEFORE = 2 / 3  # the share of the parameters without messages updated first: more bytes go to owners than come back


class Update(NamedTuple):
    """One parameter's update: its owner, its cost, and the bytes that its owner does not have."""

    owner: int
    cost: float
    sent: float


def rounds(updates: Sequence[Update], machine: Cluster, ranks: int, several: bool) -> list[list[int]]:
    """The indices of the updates in each round, the same on every rank. ``several``: whether to try several rounds."""
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
    """Each owner's updates, in order, cut into parts that end at these fractions of that owner's total cost."""
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
    """Estimated seconds until the last message has arrived, for a rank with an average share of everything."""
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
