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

from collections.abc import Callable, Collection, Mapping
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

    @property
    def compiled(self) -> bool:
        return self.plan.policy.lower == "inductor"


# By name: the fusion, bound to its options; None where it is not worth it for the target.
FUSIONS: Mapping[str, Callable[[Target], Pass | None]] = {
    "compute_copies": lambda target: compute_copies if target.trains and target.plan.copy_bytes > 0 else None,
    "flatten_gradients": lambda target: flatten_gradients if target.plan.kernels else None,
    "microbatch_sums": lambda target: microbatch_sums if target.plan.kernels else None,
    "gradient_statistics": lambda target: gradient_statistics if target.plan.kernels else None,
    "optimizer_update": lambda target: (  # under offload, one buffer at a time is on the device
        optimizer_update(target.rules) if target.plan.kernels and not target.plan.policy.offload else None
    ),
    "exchange": lambda target: exchange(target.gloo) if target.compiled and target.gloo else None,
    "direct_gradients": lambda target: (
        direct_gradients
        if target.compiled and target.plan.kernels and (target.plan.policy.unrounded_gradients or not target.tuned)
        else None
    ),
    "sum_reductions": lambda target: sum_reductions if target.plan.kernels and target.plan.axes else None,
    "in_place_all_reduce": lambda target: in_place_all_reduce if target.plan.all_axes else None,
}


def fusions_for(target: Target) -> tuple[Pass, ...]:
    """The fusions for this target, in order, without those that `Policy.without` names."""
    without = target.plan.policy.without
    if without == "all":
        return ()
    made = (make(target) for name, make in FUSIONS.items() if name not in without)
    return tuple(fusion for fusion in made if fusion is not None)


def check_names(without: Collection[str]) -> None:
    """Raises ``ValueError`` for a name in `Policy.without` that no fusion has."""
    if without != "all" and (odd := [name for name in without if name not in FUSIONS]):
        raise ValueError(f"Policy.without names {odd[0]!r}, which is no fusion; there are {', '.join(FUSIONS)}.")
