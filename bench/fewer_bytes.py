"""What it costs in loss to send less: rounded messages (`Policy.wire`) and local steps (`Policy.sync_every`).

    torchrun --nproc-per-node 2 -m bench.fewer_bytes bench/results/fewer-bytes.json

A small byte-level GPT on the text of this machine, two gloo ranks, the same batches for every policy. Losses are those
of held-out text under the weights that all ranks share (with local steps: after an exchange of all), for equal tokens.
Bytes are what a rank sends for a step, as its program says. A last argument is how many steps are taken, 2,000 unless
given.

The control is int8 whose gradients are rounded to the nearest, without error feedback: no policy asks for that, so the
function that rounds is replaced meanwhile (`nearest`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compiled import OuterSGD, Policy, compile_sharded
from fsdp_compiled.cli.data import held_out_windows, load_corpus, train_windows
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.cli.machine import hardware, versions
from fsdp_compiled.ir.nodes import carried, is_collective
from fsdp_compiled.kernels import reference
from fsdp_compiled.kernels.operators import IMPLEMENTATIONS, RUNS

STEPS, ROWS = 2000, 4  # rows a rank
EVERY, STREAMED_EVERY = 50, 500  # steps between two losses; parts on the way arrive for one, so there are fewer
CONFIG = GPTConfig(layers=2, width=64, heads=4, context=64)
TOKENS = ROWS * CONFIG.context  # of a rank in a step
STREAMED = OuterSGD(momentum=0.6, parts=5, overlap=5)
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"wire": "int8"},
    "fp8": {"wire": "fp8"},
    "int8 to the nearest": {"wire": "int8"},
    "all-reduced": {"shard": "ddp"},
    "50 local steps": {"shard": "ddp", "sync_every": 50},  # DiLoCo's outer rate and momentum: made for longer runs
    "50 local steps, momentum 0.6": {"shard": "ddp", "sync_every": 50, "outer": OuterSGD(momentum=0.6)},
    "the same in 5 parts, each 5 steps on the way": {"shard": "ddp", "sync_every": 50, "outer": STREAMED},
    "the same in int8": {"shard": "ddp", "sync_every": 50, "outer": STREAMED, "wire": "int8"},
}


def sent(program: Any, world: int, twice: str = "all_reduce", inside: str = "") -> float:
    """Bytes that a rank sends in a run of the program, on a ring. ``twice``: what collectives are called that go round
    it twice; over gloo every ``"reduce"``, since it has no reduce-scatter, and all-reduces in its place. ``inside``: an
    axis inside of hosts, which does not count."""
    whole = 0.0
    for node in program.graph.nodes:
        if is_collective(node) and node.args[-1] != inside:
            whole += max(carried(node)) * (2 if twice in str(node.target) else 1)
    return whole * (world - 1) / world


CONTROL = "int8 to the nearest"


@contextmanager
def nearest() -> Iterator[None]:
    """Inside, what is sent is rounded to the nearest on a CPU, gradients too. What kernels are tried against on first
    use is replaced as well, or the trial would find this one wrong and put the right one back."""

    def packed(values: torch.Tensor, rows: int, *_: Any, form: str) -> torch.Tensor:
        return reference.pack(values, rows, form=form)

    random = IMPLEMENTATIONS["pack"]
    IMPLEMENTATIONS["pack"] = RUNS["pack", "cpu"] = packed
    try:
        yield
    finally:
        IMPLEMENTATIONS["pack"] = RUNS["pack", "cpu"] = random


def trained(name: str, fields: dict[str, Any], steps: int) -> dict[str, Any]:
    """The losses by step, and the bytes of a step, of which so many times as many were sent till then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sharded = compile_sharded(model, optimizer, loss=next_byte_loss, policy=Policy(clip=1.0, lower="eager", **fields))
    corpus = load_corpus(None)
    windows = train_windows(corpus, CONFIG.context, ROWS * world)
    held_out = held_out_windows(corpus, CONFIG.context, 256)
    draw = torch.Generator().manual_seed(1)
    losses: dict[int, float] = {}
    every = STREAMED_EVERY if fields.get("outer") is STREAMED else EVERY
    for step in range(1, steps + 1):
        rows = torch.randint(len(windows), (ROWS * world,), generator=draw).tolist()[rank * ROWS : (rank + 1) * ROWS]
        batch = [torch.stack(one) for one in zip(*(windows[row] for row in rows), strict=True)]
        sharded.step(*batch)
        if step % every == 0 or step == steps:
            sharded.synchronize()
            weights = sharded.full_state_dict()
            if rank == 0:
                whole = GPT(CONFIG)
                whole.load_state_dict(weights)
                with torch.no_grad():
                    losses[step] = next_byte_loss(whole, *held_out).item()
                print(f"{name}: {step} steps, held-out loss {losses[step]:.4f}", flush=True)
    apart = fields.get("sync_every")
    size = sent(sharded.program, world) + (sent(sharded.outer_program, world) / apart if apart else 0.0)
    return {"losses": losses, "bytes a step": round(size)}


def describe(result: Mapping[str, Any]) -> str:
    """A row of markdown for each policy."""
    steps = result["steps"]
    lines = [
        f"| policy | bytes that a rank sends a step | loss after {steps:,} steps | over plain's |",
        "|---|---:|---:|---:|",
    ]
    for name, one in result["policies"].items():
        loss, over = one["losses"][str(steps)], one["loss over plain's"]
        lines.append(f"| {name} | {one['bytes a step']:,} | {loss:.4f} | {over:.4f} |")
    return "\n".join(lines)


def main(path: str, steps: int = STEPS) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, fields in POLICIES.items():
        with nearest() if name == CONTROL else nullcontext():
            found[name] = one = trained(name, fields, steps)
        if dist.get_rank() == 0:
            one["loss over plain's"] = round(one["losses"][steps] / found["plain"]["losses"][steps], 5)
            size, ratio = one["bytes a step"], one["loss over plain's"]
            print(f"{name:28} {size:>10,} B a step   {one['losses'][steps]:.4f}   {ratio}")
            command = f"torchrun --nproc-per-node {dist.get_world_size()} -m bench.fewer_bytes {' '.join(sys.argv[1:])}"
            text = {
                "command": command,
                "hardware": hardware(),
                "versions": versions(),
                "steps": steps,
                "policies": found,
            }
            Path(path).write_text(json.dumps(text, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
