"""Ranks that differ in what they call, in what they have, or in when they come; a case each; see ``ranks.py``.

torchrun --nproc-per-node 2 disagreements.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import Policy, Sharded, compile_sharded, fully_shard
from fsdp_compiled.distributed import watchdog
from tests.launch import told
from tests.workers.ranks import EAGER, RANK, Experts, batch, entropy, main, mse, net, shard, unchanged

PATIENT = 3.0


def first_shapes() -> Any:
    sharded = shard()
    return unchanged(sharded, lambda: sharded.step(*batch(2 + RANK)))


def known_shapes() -> Any:
    sharded = shard()
    sharded.step(*batch(2))
    sharded.step(*batch(3))
    return unchanged(sharded, lambda: sharded.step(*batch(2 + RANK)))


def known_and_new_shapes() -> Any:
    sharded = shard()
    sharded.step(*batch(2))
    return unchanged(sharded, lambda: sharded.step(*batch(2 + RANK)))


def known_and_other_mode() -> Any:
    """One rank turns to eval mode after a step that both have made."""
    sharded = shard(dropout=0.5)
    sharded.step(*batch(2))
    if RANK:
        sharded.model.eval()
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def first_shapes_then_good() -> Any:
    """New shapes that differ, after a step; then a good step, which works."""
    sharded = shard()
    sharded.step(*batch(9))
    try:
        sharded.step(*batch(4 + RANK))
    except RuntimeError as error:
        first = type(error).__name__
    return {"first": first, "finite": bool(torch.isfinite(sharded.step(*batch(9))))}


def rates() -> Any:
    """A scheduler that decides otherwise on one rank, as ReduceLROnPlateau may on a loss that is this rank's own."""
    sharded = shard()
    sharded.step(*batch(2))
    assert sharded.optimizer is not None
    sharded.optimizer.param_groups[0]["lr"] *= 1 + RANK
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def options_then_alike() -> Any:
    """An option that is no rate: each rank sets another value, and then all set the same."""
    sharded = shard()
    sharded.step(*batch(2))
    assert sharded.optimizer is not None
    (group,) = sharded.optimizer.param_groups
    group["weight_decay"] = 0.1 * (1 + RANK)
    first = told(lambda: sharded.step(*batch(2)))
    group["weight_decay"] = 0.1
    return {"first": first, "finite": bool(torch.isfinite(sharded.step(*batch(2))))}


def many_rates() -> Any:
    """Rates that differ, 40 pairs of them alike in the checksum of 12 bits that once was all that ranks compared."""
    sharded = shard()
    sharded.step(*batch(2))
    assert sharded.optimizer is not None
    group = sharded.optimizer.param_groups[0]
    raised = unchanged_by = alike = 0
    known: dict[int, float] = {}
    rate = 0.1
    while alike < 40:
        rate += 1e-5
        checksum = zlib.crc32(repr([("0.lr", rate)]).encode()) % 4096
        other = known.setdefault(checksum, rate)
        if other == rate:
            continue
        alike += 1
        group["lr"] = (rate, other)[RANK]
        before = [shard.clone() for shard in sharded.state.parameters.values()]
        try:
            sharded.step(*batch(2))
        except RuntimeError as error:
            raised += type(error).__name__ == "RankError" and "lr = " in str(error)
        unchanged_by += all(map(torch.equal, before, sharded.state.parameters.values()))
    group["lr"] = 0.1
    return {"raised": raised, "unchanged": unchanged_by, "goes on": bool(torch.isfinite(sharded.step(*batch(2))))}


def other_calls() -> Any:
    sharded = shard()
    return sharded.step(*batch(2)) if RANK else sharded.value_and_grad(*batch(2))


def models() -> Any:
    return shard(width=6 + RANK)


def policies() -> Any:
    return shard(Policy(lower="eager", clip=1.0 + RANK))


def not_a_module() -> Any:
    return compile_sharded(net() if RANK else "model")  # type: ignore[arg-type]


def losses() -> Any:
    model = net()
    loss = mse if RANK else lambda model, x, y: model(x)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=EAGER)
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def programs() -> Any:
    """The same signature on every rank, but code that looks at the rank."""
    model = net()
    scale = 1.0 + RANK
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda *args: mse(*args) * scale, policy=EAGER
    )
    return sharded.step(*batch(2))


def mesh_axes() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "data"))
    return compile_sharded(net(), mesh=mesh)


def mesh_size() -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]  # each rank alone
    return compile_sharded(net(), mesh=mesh)


def replaced_on_one() -> Any:
    """One rank replaces a weight after a step that both have made, and is refused while the other is on its way."""
    sharded = shard()
    sharded.step(*batch(2))
    if RANK:
        sharded.model[0].weight = nn.Parameter(torch.ones(6, 4))  # type: ignore[index]
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def replaced_on_both() -> Any:
    sharded = shard()
    sharded.model[0].weight = nn.Parameter(torch.ones(6, 4))  # type: ignore[index]
    return unchanged(sharded, lambda: sharded.step(*batch(2)))


def amp(on: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def autocast_on_one() -> Any:
    sharded = shard()
    with amp(bool(RANK)):
        return unchanged(sharded, lambda: sharded.step(*batch(2)))


def known_autocast_on_one() -> Any:
    """Both ranks have the programs of both modes."""
    sharded = shard()
    sharded.step(*batch(2))
    with amp():
        sharded.step(*batch(2))
    with amp(bool(RANK)):
        return unchanged(sharded, lambda: sharded.step(*batch(2)))


def inference_on_one() -> Any:
    sharded = shard()
    with torch.inference_mode(bool(RANK)):
        return unchanged(sharded, lambda: sharded.step(*batch(2)))


def inference_on_both() -> Any:
    sharded = shard()
    with torch.inference_mode():
        return unchanged(sharded, lambda: sharded.step(*batch(2)))


def odd_object() -> Any:
    """One rank's batch holds what no program takes."""
    sharded = shard()
    sharded.step(*batch(2))
    x, y = batch(2)
    return unchanged(sharded, lambda: sharded.step(x, object() if RANK else y))


def collects_alone() -> Any:
    """One rank ends its loop and collects the model, the other takes another step."""
    sharded = shard()
    sharded.step(*batch(2))
    return unchanged(sharded, sharded.full_state_dict if RANK else lambda: sharded.step(*batch(2)))


def both_compiled(accumulate: bool = False) -> Sharded:
    """Every kind of call was made before, so that none meets the other ranks."""
    sharded = shard()
    if accumulate:
        sharded.accumulate(*batch(2))
    sharded.step(*batch(2))
    sharded(batch(2)[0])
    return sharded


def evaluates_alone() -> Any:
    """One rank makes a call more, of another kind: it returns, and the step after it waits, as the other's does."""
    sharded = both_compiled()
    if RANK:
        sharded(batch(2)[0])
    return begun(lambda: [sharded.step(*batch(2)) for _ in range(3)])


def accumulates_alone() -> Any:
    """One rank takes another number of microbatches."""
    sharded = both_compiled(accumulate=True)
    if RANK:
        sharded.accumulate(*batch(2))
    return begun(lambda: [sharded.step(*batch(2)) for _ in range(3)])


def leaves_after_another_call() -> Any:
    """One rank evaluates where the other trains, and makes no call after that."""
    sharded = both_compiled()
    if RANK:
        sharded(batch(2)[0])
        time.sleep(PATIENT)
        return {}
    return begun(lambda: sharded.step(*batch(2)))


def loop_evaluates_more(rank: int) -> Any:
    """A loop of the user's own, with a batch more to evaluate on this rank. Where a backward's collectives meet a
    forward's, gloo ends the process of one of them."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(*(fully_shard(nn.Linear(*sizes)) for sizes in ((64, 8), (8, 64), (64, 8)))))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(4, 64)

    def call() -> None:
        for _ in range(2):
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for _ in range(2 + (rank == RANK)):
                    model(x)

    return {"first": told(call), "then": told(call)}


def loop_evaluates_more_on_the_first() -> Any:
    return loop_evaluates_more(0)


def loop_evaluates_more_on_the_second() -> Any:
    return loop_evaluates_more(1)


def late() -> Any:
    """One rank comes to a call much later than the other's watch looks: nothing happens."""
    sharded = both_compiled()
    waited = 0.0
    for _ in range(2):
        time.sleep(PATIENT * RANK)
        since = time.monotonic()
        sharded.step(*batch(2))
        waited = max(waited, time.monotonic() - since)
    return {"waited": waited, "watched": sharded._calls.watchdog._thread.is_alive()}  # type: ignore[union-attr]


def unstoppable() -> Any:
    """Ranks on whose connections the watch has no hold, as under NCCL."""
    watchdog.cut = lambda theirs: 0
    watchdog.GRACE = 0.5
    return evaluates_alone()


def begun(call: Callable[[], Any]) -> Any:
    """Makes the call, and adds to its error how many seconds it took."""
    since = time.monotonic()
    try:
        return call()
    except Exception as error:
        error.add_note(f"seconds: {time.monotonic() - since:.1f}")
        raise


def odd_rows() -> Any:
    """A loss that asks whether there are an odd number of rows, which one rank has."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(model, x, y) * (2 if len(x) % 2 else 1)

    model = net()
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=Policy(lower="eager", dynamic=True)
    )
    return unchanged(sharded, lambda: sharded.step(*batch(2 + RANK)))


def branches() -> Any:
    """One rank's batch takes another path through the code, and so reaches other parameters."""
    model = Experts()
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=entropy, policy=EAGER)
    return unchanged(sharded, lambda: sharded.step(torch.arange(4), plain=bool(RANK)))


if __name__ == "__main__":
    main(globals())
