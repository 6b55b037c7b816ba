"""A rank that fails in a call, catches it and goes on; a case each; see ``ranks.py``, whose ``main`` runs them.

torchrun --nproc-per-node 2 failed_calls.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.programs.failed_calls import FailedCalls
from tests.workers.ranks import RANK, main

BAD = 1000.0  # a number in the batch at which `tripwire` fails
ERRORS: dict[str, BaseException] = {
    "raises": KeyError("the user's own operator"),
    "memory": torch.OutOfMemoryError("tried to allocate more than there is"),
    "interrupt": KeyboardInterrupt(),
}
failing = "raises"


@torch.library.custom_op("failing::tripwire", mutates_args=())
def tripwire(x: torch.Tensor) -> torch.Tensor:
    if bool((x == BAD).any()):
        raise ERRORS[failing]
    return x.clone()


tripwire.register_fake(torch.empty_like)
tripwire.register_autograd(lambda context, gradient: tripwire(gradient))


class Words(nn.Module):
    """Words and numbers, with a statistic that every forward updates, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(self.embed(words) + tripwire(x)))
        return self.second(F.relu(h))


def loss(model: nn.Module, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return model(words, x).square().mean()


def batch(step: int, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(8, (3,), generator=generator), torch.randn(3, 4, generator=generator)


def bad_words() -> tuple[torch.Tensor, torch.Tensor]:
    words, x = batch(99)
    return words + 50, x


def bad_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    words, x = batch(99)
    return words, torch.full_like(x, BAD)


def make(shard: str = "zero3", lower: str = "eager", mesh: Any = None, **options: Any) -> Sharded:
    policy = Policy(shard=shard, lower=lower, bucket_mb=0, **options)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return compile_sharded(model, optimizer, loss=loss, policy=policy, mesh=mesh, units=["first", "second"])


def held(sharded: Sharded) -> list[torch.Tensor]:
    """A copy of all that a step reads and writes, but for the random state."""
    state = sharded.state
    parts = (state.parameters, state.buffers, state.optimizer, state.sums)
    return [value.clone() for part in parts for value in part.values()] + [state.step.clone()]


def caught(call: Callable[[], Any]) -> dict[str, Any]:
    """What the call raised, and after how many seconds."""
    since = time.monotonic()
    try:
        call()
        found = {"error": "", "message": ""}
    except BaseException as error:
        found = {"error": type(error).__name__, "message": str(error)}
    return {**found, "seconds": time.monotonic() - since}


@dataclass
class Pair:
    """One that fails, in a case after the other, and one that makes the same calls but for those that fail."""

    sharded: Sharded
    control: Sharded

    def goes_on(self, fails: Callable[[], Any], call: Callable[..., Any] = Sharded.step) -> dict[str, Any]:
        """Two calls of both, one that fails on rank 1, and two more of both: they end with the same."""
        for step in range(2):
            self.both(call, step)
        before = held(self.sharded)
        found = caught(fails)
        same = all(map(torch.equal, before, held(self.sharded)))
        for step in range(2, 4):
            self.both(call, step)
        equal = all(map(torch.equal, held(self.sharded), held(self.control)))
        moved = not all(map(torch.equal, before, held(self.sharded)))
        return {**found, "unchanged": same, "as if it had not been": equal and moved}

    def both(self, call: Callable[..., Any], step: int) -> None:
        for one in (self.sharded, self.control):
            call(one, *batch(step))


def pair(shard: str = "zero3", lower: str = "eager", **options: Any) -> Pair:
    return Pair(make(shard, lower, **options), make(shard, lower, **options))


def during(two: Pair, bad: Callable[[], Any] = bad_words) -> dict[str, Any]:
    """The bad batch comes to rank 1 alone."""
    return two.goes_on(lambda: two.sharded.step(*(bad() if RANK else batch(7))))


def hsdp() -> dict[str, Any]:
    """Two replicas, of one rank each or, with four ranks, of two."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return during(pair(mesh=mesh))


def memory(two: Pair) -> dict[str, Any]:
    """Of rank 1, in backward, with gathers on the wire."""
    return two.goes_on(lambda: failed_step(two.sharded, "memory"))


def failed_step(sharded: Sharded, kind: str) -> Any:
    global failing
    failing = kind
    try:
        sharded.step(*(bad_numbers() if RANK else batch(7)))
    finally:
        failing = "raises"


def for_good(fails: Callable[[Sharded], Any]) -> dict[str, Any]:
    """A failure after which nobody can go on."""
    sharded = make()
    sharded.step(*batch(0))
    found = caught(lambda: fails(sharded))
    return {**found, "next": caught(lambda: sharded.step(*batch(1))), "group": dist.is_initialized()}


def interrupt() -> dict[str, Any]:
    """An interrupt in the middle of rank 1's program, that it catches."""
    return for_good(lambda sharded: failed_step(sharded, "interrupt"))


def in_the_update() -> dict[str, Any]:
    """Rank 1 fails when all ranks have what they need for the update; the other hears of it in its next call."""

    def fails(sharded: Sharded) -> None:
        if RANK:
            name = next(iter(sharded.state.parameters))
            sharded.state.optimizer[f"{name}.exp_avg"] = torch.zeros(3)  # type: ignore[index]
        sharded.step(*batch(1))

    return for_good(fails)


class Unflattened:
    """An entry of the batch that cannot be taken apart."""


torch.utils._pytree.register_pytree_node(
    Unflattened, lambda value: (_ for _ in ()).throw(KeyError("taken apart")), lambda values, _: Unflattened()
)


def not_flattened(two: Pair) -> dict[str, Any]:
    """The user's pytree code fails on rank 1, while the other is in the call."""
    return two.goes_on(lambda: two.sharded.step(*((Unflattened(), 1) if RANK else batch(7))))


def rate(two: Pair) -> dict[str, Any]:
    """Rank 1's learning rate is no number."""

    def fails() -> None:
        (group,) = two.sharded.optimizer.param_groups  # type: ignore[union-attr]
        before = group["lr"]
        group["lr"] = "fast" if RANK else before
        try:
            two.sharded.step(*batch(7))
        finally:
            group["lr"] = before

    return two.goes_on(fails)


def shapes(two: Pair) -> dict[str, Any]:
    """Rank 1 comes with a shape that was never seen, while the other is in the call."""
    words, x = batch(7)
    rows = 2 if RANK else 3
    return two.goes_on(lambda: two.sharded.step(words[:rows], x[:rows]))


def gradient(two: Pair) -> dict[str, Any]:
    fails = lambda: two.sharded.value_and_grad(*(bad_words() if RANK else batch(7)))  # noqa: E731
    found = two.goes_on(fails, Sharded.value_and_grad)  # which updates nothing but buffers
    for step in range(2):
        two.both(Sharded.step, step)
    return {**found, "and steps": all(map(torch.equal, held(two.sharded), held(two.control)))}


def microbatches(two: Pair) -> dict[str, Any]:
    """A microbatch fails on rank 1: the step at the end of the row raises on both; the next row is as on a new one."""
    for one in (two.sharded, two.control):
        one.accumulate(*batch(0))
        one.step(*batch(1))
    first = caught(lambda: two.sharded.accumulate(*(bad_words() if RANK else batch(7))))
    two.sharded.accumulate(*batch(8))
    before = held(two.sharded)[:2]
    found = caught(lambda: two.sharded.step(*batch(9)))
    same = all(map(torch.equal, before, held(two.sharded)[:2]))
    for one in (two.sharded, two.control):
        one.state.buffers["norm.running_mean"].zero_()
        one.state.buffers["norm.running_var"].fill_(1)
        one.state.buffers["norm.num_batches_tracked"].zero_()
        one.accumulate(*batch(2))
        one.step(*batch(3))
    equal = all(map(torch.equal, held(two.sharded), held(two.control)))
    return {**found, "first": first, "unchanged": same, "as if it had not been": equal}


def last_microbatch(two: Pair) -> dict[str, Any]:
    """The step at the end of a row fails; the sums are still there, and the step can be made again."""
    two.both(Sharded.accumulate, 2)
    before = held(two.sharded)
    found = caught(lambda: two.sharded.step(*(bad_words() if RANK else batch(7))))
    same = all(map(torch.equal, before, held(two.sharded)))
    two.both(Sharded.step, 3)
    equal = all(map(torch.equal, held(two.sharded), held(two.control)))
    return {**found, "unchanged": same, "as if it had not been": equal}


def first_microbatch(two: Pair) -> dict[str, Any]:
    """The row begins with a failure, so that rank 1 has no sums yet."""
    sharded = two.sharded
    sharded.state.sums.clear()
    first = caught(lambda: sharded.accumulate(*(bad_words() if RANK else batch(7))))
    found = caught(lambda: sharded.step(*batch(9)))
    sharded.step(*batch(9))
    return {**found, "first": first}


def skipped(two: Pair) -> dict[str, Any]:
    """Rank 1's loader fails outside of any call, and it goes on with the next batch: ranks pair their k-th calls."""
    before = int(two.sharded.state.step)
    for step in range(4):
        two.sharded.step(*batch(step + (step > 1) * RANK))
    return {"steps": int(two.sharded.state.step) - before}


def forward(two: Pair) -> dict[str, Any]:
    """Rank 1 fails in forward alone; the other has its result, which is the right one."""
    sharded = two.sharded
    sharded.model.eval()
    expected = sharded(*batch(7))
    results: list[torch.Tensor] = []
    found = caught(lambda: results.append(sharded(*(bad_words() if RANK else batch(7)))))
    again = sharded(*batch(7))
    return {
        **found,
        "right": [torch.equal(result, expected) for result in results],
        "goes on": torch.equal(again, expected),
    }


def all_go_on() -> dict[str, Any]:
    """Each case in which all go on, those with the same policy on the same two models."""
    found = {}
    for (shard, lower), cases in GOES_ON.items():
        two = pair(shard, lower, prefetch=1)
        found |= {name: case(two) for name, case in cases.items()}
    return found


def other_placements() -> dict[str, Any]:
    """The same in other placements."""
    cases = (("zero2", "eager", bad_words), ("zero1", "eager", bad_words), ("zero3", "inductor", bad_numbers))
    found = {f"{shard} {lower}": during(pair(shard, lower), bad) for shard, lower, bad in cases}
    found |= {"ddp operator": during(pair("ddp"), bad_numbers)}
    return found | {"zero3 whole gradients": microbatches(pair(accumulate="full"))}


GOES_ON: dict[tuple[str, str], dict[str, Callable[[Pair], dict[str, Any]]]] = {
    ("zero3", "eager"): {
        "zero3": during, "operator": partial(during, bad=bad_numbers), "memory": memory, "gradient": gradient,
        "not_flattened": not_flattened, "rate": rate, "shapes": shapes, "microbatch": microbatches,
        "last_microbatch": last_microbatch,
        # from here on the two are not the same
        "first_microbatch": first_microbatch, "skipped": skipped, "forward": forward,
    },
    ("ddp", "inductor"): {"ddp": during, "ddp_operator": partial(during, bad=bad_numbers)},
}  # fmt: skip


def joined(catches: tuple[bool, bool]) -> dict[str, Any]:
    """Rank 0 has run out, rank 1 fails in a step; and either catches that inside of the block, or not."""
    sharded = make(weigh="rows")
    sharded.step(*batch(0))
    made = 0

    def block() -> None:
        nonlocal made
        with sharded.join():
            for step in range(4 if RANK else 1):
                try:
                    sharded.step(*(bad_words() if RANK and step == 2 else batch(step)))
                    made += 1
                except Exception:
                    if not catches[RANK]:
                        raise

    found = caught(block)
    sharded.step(*batch(5))
    return {**found, "steps": int(sharded.state.step)}


def told_nobody() -> dict[str, Any]:
    """The control: a rank that keeps its failure to itself, and a process group that waits three seconds."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    sharded = make()
    sharded.step(*batch(0))
    with mock.patch.object(FailedCalls, "handle", lambda self, compiled, state, error, ran, rates: error):
        found = caught(lambda: sharded.step(*(bad_words() if RANK else batch(7))))
    time.sleep(5 * RANK)  # a next call would meet the other's in the middle, and gloo would end both processes
    return found


for one, catches in (("joined_caught", (False, True)), ("joined_uncaught", (False, False))):
    globals()[one] = partial(joined, catches)


if __name__ == "__main__":
    main(globals())
