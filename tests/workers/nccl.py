"""Collectives of a process group of one rank inside CUDA graphs, and its end; written by rank 0 as JSON.

torchrun --nproc-per-node 1 nccl.py RESULT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compiled.ir.nodes import c10d
from fsdp_compiled.ir.program import Port
from fsdp_compiled.lower.cuda_device import CudaGraphs
from fsdp_compiled.lower.cuda_graph import Replays

STEPS, WIDTH = 60, 512
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
assert dist.group.WORLD is not None
group = dist.group.WORLD.group_name


def wait(tensor: Any) -> Any:
    return c10d.wait_tensor.default(tensor)


def step(shard: torch.Tensor, rate: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
    """A small step of this package by hand: gather, use, reduce, update; two collectives under way at once."""
    full = c10d.all_gather_into_tensor.default(shard, 1, group)
    norm = c10d.all_reduce.default(x.square().sum(), "sum", group)
    weight = wait(full).view(WIDTH, WIDTH)
    y = torch.tanh(x @ weight)
    gradient = x.t() @ (y * (1 - y * y))
    reduced = wait(c10d.reduce_scatter_tensor.default(gradient.reshape(-1).contiguous(), "avg", 1, group))
    shard.sub_(reduced * rate)
    return y.square().mean(), wait(norm)


def train(replays: Replays | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shard = torch.randn(WIDTH * WIDTH, device=device, generator=generator) / WIDTH**0.5
    rate = torch.full((), 1e-2, device=device)
    ports = [Port("in", "shard", "w"), Port("in", "hyper", "lr"), Port("in", "batch", "x")]
    run = step if replays is None else replays.wrap(step, ports, "step", lambda text: [text])
    found = []
    for index in range(STEPS):
        if index % 7 == 6:
            rate.fill_(1e-2 / (1 + index))
        x = torch.randn(8, WIDTH, device=device, generator=generator)
        with torch.no_grad():
            found.append(torch.stack(list(run(shard, rate, x))))
    return found, shard


def reads(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return (x * float(x.sum()),)


expected, weights = train(None)
replays = Replays(CudaGraphs(device), "auto")
found, mine = train(replays)
answer: dict[str, Any] = {
    "same": all(torch.equal(*pair) for pair in zip(found, expected, strict=True)) and torch.equal(mine, weights),
    "worst": max(float(((a - b).abs() / b.abs()).max()) for a, b in zip(found, expected, strict=True)),
    "moved": len({float(each[0]) for each in expected}) == STEPS,
    "launches": replays.launches,
}
# One that reads on the host breaks off its capture, runs as it is, and leaves the others their graphs.
broken = replays.wrap(reads, [Port("in", "batch", "x")], "reads", lambda text: [text])
x = torch.arange(4.0, device=device)
answer["broken"] = [broken(x)[0].tolist() for _ in range(5)] == [(x * 6).tolist()] * 5
answer["launches after"] = replays.launches
again, _ = train(replays)
answer["again"] = all(torch.equal(*pair) for pair in zip(again, expected, strict=True))
answer["memory"] = torch.cuda.memory_reserved()
with open(sys.argv[1], "w") as file:
    json.dump(answer, file)
dist.destroy_process_group()  # with the graphs alive, as a script would: it must not wait for them
