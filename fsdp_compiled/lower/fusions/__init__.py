"""Fusions: passes over the same `Program` that make it faster and keep its meaning.

They run after the passes, by the same runner, and what they leave is checked, dumped, hashed, agreed upon by the ranks
and run: nothing rewrites a program after them.

| name                  | makes                                            | of                        | where    |
|-----------------------|--------------------------------------------------|---------------------------|----------|
| `compute_copies`      | gathers of a shard kept in the compute dtype     | a cast, for each gather   | training |
| `flatten_gradients`   | one operator                                     | reshape, cat, cast, scale | a GPU    |
| `microbatch_sums`     | one operator                                     | a sum for each buffer     | a GPU    |
| `gradient_statistics` | one operator                                     | norms, of each gradient   | a GPU    |
| `optimizer_update`    | one operator a group                             | scaling, and the update   | a GPU    |
| `exchange`            | an exchange and a sum                            | a reduce-scatter          | gloo     |
| `direct_gradients`    | products that write into the buffer that is sent | a flatten and its sources | Inductor |
| `sum_reductions`      | a sum over ranks, divided before                 | a mean over ranks         | a GPU    |
| `in_place_all_reduce` | an all-reduce that writes its input              | one that copies it first  | ranks    |

To leave one out: ``Policy(without=("exchange",))``. To add one: a pass here, its test, and an entry in `FUSIONS`. A
fusion finds its work by ports, marks and the operators that passes emit, and knows nothing of other fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from fsdp_compiled.lower.fusions.compute_copies import compute_copies
from fsdp_compiled.lower.fusions.flatten_gradients import direct_gradients, flatten_gradients
from fsdp_compiled.lower.fusions.gradient_statistics import gradient_statistics
from fsdp_compiled.lower.fusions.microbatch_sums import microbatch_sums
from fsdp_compiled.lower.fusions.optimizer_update import optimizer_update
from fsdp_compiled.lower.fusions.reductions import exchange, in_place_all_reduce, sum_reductions
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.passes import Pass
from fsdp_compiled.plan.plan import Plan


@dataclass(frozen=True)
class Target:
    """What a program is fused for; the same on all ranks. ``trains``: whether it is a step or a microbatch. ``gloo``:
    the axes whose collectives gloo runs. ``tuned``: whether Inductor, on any rank, was told to choose among kernels for
    each product itself."""

    plan: Plan
    rules: tuple[Rule, ...]
    trains: bool
    gloo: tuple[str, ...] = ()
    tuned: bool = False


@dataclass(frozen=True)
class Fusion:
    """``make`` binds the pass to its options; ``suits`` says whether the fusion is worth it for a target."""

    name: str
    make: Callable[[Target], Pass]
    suits: Callable[[Target], bool]


def _kernels(target: Target) -> bool:
    return target.plan.kernels


def _copies(target: Target) -> bool:
    return target.trains and target.plan.copy_bytes > 0


def _compiled(target: Target) -> bool:
    return target.plan.policy.lower == "inductor"


FUSIONS: tuple[Fusion, ...] = (
    Fusion("compute_copies", lambda target: compute_copies, _copies),
    Fusion("flatten_gradients", lambda target: flatten_gradients, _kernels),
    Fusion("microbatch_sums", lambda target: microbatch_sums, _kernels),
    Fusion("gradient_statistics", lambda target: gradient_statistics, _kernels),
    Fusion(
        "optimizer_update",
        lambda target: optimizer_update(target.rules),
        lambda target: (
            _kernels(target) and not target.plan.policy.offload
        ),  # there one buffer at a time is on the device
    ),
    Fusion(
        "exchange",
        lambda target: exchange(target.gloo),
        lambda target: _compiled(target) and bool(target.gloo),
    ),
    Fusion(
        "direct_gradients",
        lambda target: direct_gradients,
        lambda target: (
            _compiled(target) and _kernels(target) and (target.plan.policy.unrounded_gradients or not target.tuned)
        ),
    ),
    Fusion(
        "sum_reductions",
        lambda target: sum_reductions,
        lambda target: _kernels(target) and bool(target.plan.axes),
    ),
    Fusion("in_place_all_reduce", lambda target: in_place_all_reduce, lambda target: bool(target.plan.all_axes)),
)


def fusions_for(target: Target) -> tuple[Pass, ...]:
    """The fusions for this target, in order, without those that `Policy.without` names."""
    without = target.plan.policy.without
    if without == "all":
        return ()
    return tuple(fusion.make(target) for fusion in FUSIONS if fusion.name not in without and fusion.suits(target))


def check_names(without: Collection[str]) -> None:
    """Raises ``ValueError`` for a name in `Policy.without` that no fusion has."""
    known = [fusion.name for fusion in FUSIONS]
    if without != "all" and (odd := [name for name in without if name not in known]):
        raise ValueError(f"Policy.without names {odd[0]!r}, which is no fusion; there are {', '.join(known)}.")
