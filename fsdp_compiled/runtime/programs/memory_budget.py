"""Makes a step fit into `Policy.memory_gb`. It gathers less far ahead, then recomputes saved values or sends them to
host memory, then keeps fewer units alive, until the predicted peak fits.

    prefetch=2, limit as it comes         predicted peak 1.31 GiB
    prefetch=1                                           1.19 GiB
    prefetch=0                                           1.07 GiB
    14 of 96 saved values made again                     0.99 GiB    <- the first within memory_gb=1
    96 of 96, limit=2                                    0.61 GiB

The order follows the price: gathering ahead costs only memory, recomputing costs compute, and a lower limit gathers
again. A knapsack chooses the values: the least time for so many bytes (`analysis.saved_values`). Each value takes the
cheaper way: recomputed, or kept in host memory meanwhile, where the device has memory of its own (`storable`). A choice
does not save the sum of its bytes, since recomputed values are alive in backward. So more values are chosen until the
resulting program, with all its passes and fusions, is predicted to fit. Only fields that the policy leaves on
``"auto"`` are changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_compiled import passes
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.analysis.saved_values import Saved, cheapest, saved_values, storable
from fsdp_compiled.ir.liveness import live_ranges, most_gathered
from fsdp_compiled.ir.nodes import base_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.text import human
from fsdp_compiled.policy import MOST_AHEAD, Policy

log = logging.getLogger("fsdp_compiled")
GIB = 2**30


# Factors of the missing bytes that are recomputed, try by try; then everything that can be. If that is not enough, the
# least peak may come with less, since recomputed values are alive together: so parts of everything are tried, too.
MORE = (1.0, 1.5, 2.25, 3.5)
FEWER = (3 / 4, 1 / 2, 1 / 4)


@dataclass(frozen=True)
class _Tried:
    stages: list[Program]
    memory: Memory
    how: str

    @property
    def peak(self) -> int:
        return self.memory.peak.nbytes


@dataclass(frozen=True)
class _Budget:
    """What has to fit: the plan, the passes that made its program, and how memory is predicted."""

    plan: Plan
    predict: Callable[[Program], Memory]
    transforms: Sequence[passes.Pass]
    host: bool  # whether values may be kept in host memory

    @property
    def nbytes(self) -> int:
        assert self.plan.policy.memory_gb is not None
        return int(self.plan.policy.memory_gb * GIB)

    def __str__(self) -> str:
        return f"memory_gb={self.plan.policy.memory_gb:g}"

    def made(self, done: Sequence[Program], policy: Policy, rest: Sequence[passes.Pass], how: str) -> _Tried | None:
        """These stages, and what the rest of the passes make of the last one under this policy. None where a node reads
        more units than may be alive, or memory is not predicted."""
        stages: list[Program] = []
        try:
            program = passes.run(done[-1], replace(self.plan, policy=policy), rest, stages.append)
        except ValueError:
            return None
        memory = self.predict(program)
        return None if memory.unknown else _Tried([*done[:-1], *stages], memory, how)


def fit(
    stages: Sequence[Program],
    plan: Plan,
    predict: Callable[[Program], Memory],
    transforms: Sequence[passes.Pass] = (),
    host: bool = False,
) -> list[Program]:
    """The stages, with the last ones replaced if the program is over the budget.

    ``predict``: the memory of the program that will run, after fusions. The program's notes say what was chosen. The
    last stages are those of `passes.SCHEDULING`; ``transforms``: all the passes that made the stages; without them,
    nothing is recomputed. ``host``: values may be kept in host memory. If nothing fits, the result is the smallest
    program, with a warning. If memory cannot be predicted, the stages stay as they are, with a warning.
    """
    if plan.policy.memory_gb is None:
        return list(stages)
    budget = _Budget(plan, predict, transforms, host)
    needed = predict(stages[-1])
    if needed.unknown:
        reason = f"{budget} has no effect: memory is not predicted: {needed.unknown}"
        log.warning("%s", reason)
        return [*stages[:-1], replace(stages[-1], notes=(*stages[-1].notes, reason))]
    found = [_Tried(list(stages), needed, "as chosen without it")]
    if found[0].peak <= budget.nbytes:
        return list(stages)
    for one in _less_and_less(found[0], budget):
        found.append(one)
        if one.peak <= budget.nbytes:
            break
    chosen = min(found, key=lambda one: one.peak)
    if chosen.peak <= budget.nbytes:
        reason = f"{chosen.how}: the first that fits {budget}, with a peak of {human(chosen.peak)}"
    else:
        reason = (
            f"{chosen.how}: nothing fits {budget}; the least is {human(chosen.peak)}, at {chosen.memory.peak}. "
            'A smaller batch, accumulate, recompute="unit" or more ranks would take less'
        )
        log.warning("%s", reason)
    last = chosen.stages[-1]
    return [*chosen.stages[:-1], replace(last, notes=(*last.notes, reason))]


def _less_and_less(first: _Tried, budget: _Budget) -> Iterator[_Tried]:
    """Programs that take less and less memory, each at a higher price than the one before."""
    policy, made = budget.plan.policy, list(first.stages)
    before = made[: _before(made, "limit")]
    for policy in _less_ahead(budget.plan):
        one = budget.made(before, policy, passes.SCHEDULING, f"prefetch={policy.prefetch}")
        if one is None:
            return
        yield one
    best = None
    for values, how in _values_freed(first, budget):
        done = made[: _before(made, "recompute")]
        rest = _from_recompute(budget.transforms)[: -len(passes.SCHEDULING)]
        again = (passes.recompute_saved(_nodes(values, stored=False)), *rest)
        away = [passes.store_saved(names)] if (names := _nodes(values, stored=True)) else []
        one = budget.made(done, policy, (*again, *away, *passes.SCHEDULING), how)
        if one is None:
            break
        best = one if best is None or one.peak < best.peak else best
        yield one
    so_far = ""
    if best is not None and best.peak < first.peak:
        before, so_far = best.stages[: _before(best.stages, "limit")], f"{best.how}, "
    for fewer in _fewer_alive(policy, most_gathered(live_ranges(made[-1].graph))):
        one = budget.made(before, fewer, passes.SCHEDULING, f"{so_far}prefetch={fewer.prefetch}, limit={fewer.limit}")
        if one is None:
            return
        yield one


def _less_ahead(plan: Plan) -> Iterator[Policy]:
    """Policies that gather fewer units ahead. None on CPUs, where ``"auto"`` gathers ahead only where that takes no
    memory."""
    policy = plan.policy
    if policy.prefetch == "auto" and plan.device.type != "cpu":
        most = policy.limit if isinstance(policy.limit, int) else MOST_AHEAD
        for ahead in reversed(range(min(most, MOST_AHEAD))):
            yield replace(policy, prefetch=ahead)


def _fewer_alive(policy: Policy, alive: int) -> Iterator[Policy]:
    least = policy.prefetch if isinstance(policy.prefetch, int) else 0
    if policy.limit == "auto":
        for limit in range(alive - 1, least, -1):
            yield replace(policy, limit=limit)


def _values_freed(first: _Tried, budget: _Budget) -> Iterator[tuple[list[Saved], str]]:
    """Values that forward need not keep, more of them each time, with a description."""
    done = _before(first.stages, "recompute")
    if not done or not _from_recompute(budget.transforms):
        return
    values = _candidates(first.stages[done - 1], budget)
    whole = sum(value.nbytes for value in values)
    missing = first.peak - budget.nbytes
    more = [size for size in (int(missing * factor) for factor in MORE) if size < whole]
    fewer = [size for size in (int(whole * part) for part in FEWER) if size < missing]
    for wanted in [*more, whole, *fewer] if values else []:
        chosen = cheapest(values, wanted)
        yield chosen, _said(chosen, len(values))


def _candidates(program: Program, budget: _Budget) -> list[Saved]:
    """The values that can be recomputed or kept in host memory, each in the cheaper way."""
    recompute = budget.plan.policy.recompute
    again = {value.name: value for value in saved_values(program, budget.plan)} if recompute == "auto" else {}
    stored = storable(program, budget.plan, again) if budget.host and recompute != "unit" else []
    nodes = {node.name: node for node in program.graph.nodes}
    taken = {base_of(nodes[value.name]).name for value in stored}
    return [*(value for name, value in again.items() if name not in taken), *stored]


def _nodes(values: Sequence[Saved], stored: bool) -> frozenset[str]:
    return frozenset().union(*(value.nodes for value in values if value.stored == stored))


def _said(chosen: Sequence[Saved], count: int) -> str:
    parts = []
    for stored, what in ((False, "made again in backward"), (True, "in host memory meanwhile")):
        own = [value for value in chosen if value.stored == stored]
        if own:
            size, seconds = human(sum(value.nbytes for value in own)), sum(value.seconds for value in own)
            parts.append(f"{len(own)} of {count} saved values, {size}, {what} at some {1e3 * seconds:.3g} ms")
    return ", ".join(parts)


def _before(stages: Sequence[Program], name: str) -> int:
    """The number of stages before this pass; 0 if it did not run."""
    return next((at for at, one in enumerate(stages) if one.history and one.history[-1] == name), 0)


def _from_recompute(transforms: Sequence[passes.Pass]) -> Sequence[passes.Pass]:
    return transforms[transforms.index(passes.recompute) :] if passes.recompute in transforms else ()
