"""In which order owners update what they own, so that messages travel while they compute.

    one round     to owners ==== | step on all             | back ==
    in rounds     step on what its owner has, some | step on what came | step on the rest | word
                  to owners ============           |                   | back ========

What its owner has all of is in no message: it is updated first, and last, and what is sent in between, in one chunk or
in several. That is the same on every rank, and chosen by what each takes on the rough figures of `hardware`. Whether
all went well is said at the end, and nothing that was sent is written before: in the last message back, or where the
last round sends none, in one of its own, which is what rounds cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp_compiled.plan.hardware import Cluster

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
