"""Trains on real ranks and says what was predicted of the memory and what the allocator did.

``torchrun memory.py RESULT``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.runtime.sharded import Sharded
from tests.allocator import Gathers, Recording, Waited, held, record
from tests.launch import answer
from tests.parts import parts

LOST = 256  # bytes that a step may leave behind: its loss and norm


def recorded(run: Callable[[], Any]) -> Recording:
    """One run's events.

    A thread of gloo may still be the last to drop a buffer; then something seems to be kept, and the run is repeated.
    """
    for _ in range(60):
        with record() as recording, Waited():
            run()
        whole = torch.tensor(float(recording.kept < LOST))
        dist.all_reduce(whole, op=dist.ReduceOp.MIN)
        if whole:
            return recording
    raise RuntimeError("every recording has lost a free")


def counted(run: Callable[[], Any]) -> Gathers:
    """One run's gathers; a thread of gloo that is late to drop a buffer makes them seem more, never fewer."""
    with Gathers() as gathers, Waited():
        run()
    return gathers


def compare(sharded: Sharded, numbers: Any, memory: Memory, run: Callable[[], Any]) -> dict[str, Any]:
    """``numbers``: what a rank holds besides its state."""
    recording = recorded(run)
    gathers = min((counted(run) for _ in range(4)), key=lambda one: (one.most, one.alive))
    state = (sharded.state, numbers)
    return {
        "persistent": {"predicted": memory.persistent.total, "real": held(state)},
        "peak": {"predicted": memory.peak.nbytes, "real": held(state) + memory.batch + recording.peak},
        "wire": memory.at_peak().get("wire", 0),
        "beyond": recording.peak,
        "gathers": {"most": gathers.most, "left": gathers.alive},
    }


CASES = {
    "zero3 wide": (Policy(prefetch=0), 64, 4, ("step",)),  # activations weigh more than parameters
    "zero3": (Policy(accumulate="shards", clip=1.0, prefetch=0), 128, 1, ("accumulate", "last")),
    "zero2": (Policy(shard="zero2", accumulate="full", prefetch=0), 128, 1, ("accumulate", "last")),
    "zero1": (Policy(shard="zero1", prefetch=0), 128, 1, ("step",)),
    "ddp": (Policy(shard="ddp"), 128, 1, ("step",)),
    "ahead": (Policy(prefetch=1), 64, 4, ("step",)),
    **{f"limit {most}": (Policy(shard="zero2", limit=most), 64, 1, ("step",)) for most in (1, 2)},
}


def measure() -> dict[str, Any]:
    """By case and kind of program."""
    found = {}
    for name, (policy, width, rows, kinds) in CASES.items():
        model = GPT(GPTConfig(layers=2, width=width, heads=2, context=32))
        optimizer = torch.optim.AdamW(model.parameters())
        policy = replace(policy, lower="eager", bucket_mb=0)
        with parts() as of:
            sharded = compile_sharded(model, optimizer, loss=next_byte_loss, policy=policy)
        batch = torch.randint(256, (2, rows, 32)).unbind()
        calls = {kind: sharded.accumulate if kind == "accumulate" else sharded.step for kind in kinds}
        for call in calls.values():  # compiles
            call(*batch)
        numbers = of(sharded).hyperparameters.tensors, torch.zeros(1, dtype=torch.int64)  # and the rank
        for made in of(sharded).programs.cached:
            run = partial(calls[made.kind], *batch)
            found[f"{name} {made.kind}"] = compare(sharded, numbers, made.memory, run)
    return found


if __name__ == "__main__":
    answer(measure)
