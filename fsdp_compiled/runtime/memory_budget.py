"""A step that fits into `Policy.memory_gb`: fewer units ahead, then fewer units alive, until the predicted peak does.

    prefetch=2, limit as it comes    predicted peak 1.31 GiB
    prefetch=1                                      1.19 GiB
    prefetch=0                                      1.07 GiB
    prefetch=0, limit=2                             0.98 GiB    <- the first within memory_gb=1

In this order because gathering ahead costs nothing but memory, while a lower limit gathers again. Only what the policy
leaves on ``"auto"`` is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fsdp_compiled import passes
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.ir.liveness import live_ranges, most_gathered
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import human
from fsdp_compiled.policy import MOST_AHEAD, Policy

log = logging.getLogger("fsdp_compiled")
GIB = 2**30


def fit(stages: Sequence[Program], plan: Plan, predict: Callable[[Program], Memory]) -> list[Program]:
    """The stages, with other last ones if the program is over the budget.

    ``predict``: the memory of what will run, which is the program fused. What was chosen is in its notes. The last
    stages are those of `passes.SCHEDULING`. Where nothing fits, it is the least there is, with a warning; where memory
    cannot be predicted, nothing is chosen by it, with a warning.
    """
    if plan.policy.memory_gb is None:
        return list(stages)
    *done, before = stages[: -len(passes.SCHEDULING)]
    needed = predict(stages[-1])
    if needed.unknown:
        reason = f"memory_gb={plan.policy.memory_gb:g} has no effect: memory is not predicted: {needed.unknown}"
        log.warning("%s", reason)
        return [*stages[:-1], replace(stages[-1], notes=(*stages[-1].notes, reason))]
    if needed.peak.nbytes <= plan.policy.memory_gb * GIB:
        return list(stages)
    found = [(list(stages[len(done) :]), needed, "as chosen without it")]
    for policy in _tighter(plan.policy, most_gathered(live_ranges(stages[-1].graph))):
        other: list[Program] = []
        try:
            program = passes.run(before, replace(plan, policy=policy), passes.SCHEDULING, other.append)
        except ValueError:  # a node reads more units than that
            break
        if (less := predict(program)).unknown:
            break
        found.append((other, less, f"prefetch={policy.prefetch}, limit={policy.limit}"))
        if found[-1][1].peak.nbytes <= plan.policy.memory_gb * GIB:
            break
    chosen, memory, how = min(found, key=lambda one: one[1].peak.nbytes)
    budget = f"memory_gb={plan.policy.memory_gb:g}"
    if memory.peak.nbytes <= plan.policy.memory_gb * GIB:
        reason = f"{how}: the first that fits {budget}, with a peak of {human(memory.peak.nbytes)}"
    else:
        reason = (
            f"{how}: nothing fits {budget}; this takes {human(memory.peak.nbytes)} at {memory.peak}. A smaller batch, "
            'accumulate, recompute="unit" or more ranks would take less'
        )
        log.warning("%s", reason)
    chosen[-1] = replace(chosen[-1], notes=(*before.notes, reason))
    return [*done, *chosen]


def _tighter(policy: Policy, alive: int) -> Iterator[Policy]:
    least = policy.prefetch if isinstance(policy.prefetch, int) else 0
    if policy.prefetch == "auto":
        most = policy.limit if isinstance(policy.limit, int) else MOST_AHEAD
        for ahead in reversed(range(min(most, MOST_AHEAD))):
            yield replace(policy, prefetch=ahead)
    if policy.limit == "auto":
        for limit in range(alive - 1, least, -1):
            yield replace(policy, prefetch=least, limit=limit)
