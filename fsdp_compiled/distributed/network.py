"""Measures how fast ranks reach each other, for ``Policy(network="measure")``.

A gather of next to nothing shows the network's latency. Larger ones, doubled until one takes `LONG`, show its rate. All
ranks gather at once, as in a step, and use the slowest one's clock, so that all come to the same figures. These have
one digit, so that the next start most often comes to the same programs. If the rate is about that of the device's model
(`LIKE`), the model's is kept: on one host a measurement shows what else runs there.
"""

from __future__ import annotations

import time

import torch

from fsdp_compiled.distributed.mesh import Mesh, any_rank, largest

c10d = torch.ops._c10d_functional
FIRST, MOST = 2**16, 2**28  # bytes that a rank receives
LONG = 0.1  # seconds
TIMES = 3  # how often each is made; the fastest counts, since others may be at work meanwhile
BEYOND = 4  # latencies that a gather must take to say anything of the rate
LIKE = 4.0  # times slower than the device's model


def measured(mesh: Mesh, usual: float) -> tuple[float, float] | None:
    """Gigabits a second from and to each rank, and milliseconds of a small gather, along the shard axis, or along the
    replicas if that axis has one rank. None if the network is about as it usually is, with ``usual`` bytes a second.
    Collective over all ranks."""
    axis, ranks = ("shard", mesh.shard) if mesh.shard > 1 else ("replicate", mesh.replicate)
    if ranks == 1:
        return None
    latency = min(_seconds(mesh, axis, ranks, 1) for _ in range(2 * TIMES))
    size, taken, rate = FIRST, 0.0, 0.0
    while taken < LONG and size <= MOST:
        numel = size // (ranks - 1)
        taken = min(_seconds(mesh, axis, ranks, numel) for _ in range(TIMES))
        if taken > BEYOND * latency:
            rate = max(rate, numel * (ranks - 1) / (taken - latency))
        size *= 2
    if rate * LIKE >= usual or not rate:
        return None
    return _one_digit(rate * 8e-9), _one_digit(latency * 1e3)


def described(network: tuple[float, float] | None) -> str:
    """For the plan's notes."""
    if network is None:
        return "network: measured, about as such devices usually have"
    return f"network: measured, {network[0]:g} Gbit/s and {network[1]:g} ms a message"


def _seconds(mesh: Mesh, axis: str, ranks: int, numel: int) -> float:
    """The slowest rank's time of a gather to which each rank gives so many bytes."""
    own = torch.ones(numel, dtype=torch.uint8, device=mesh.device)
    any_rank(False, mesh)  # returns once all are here
    began = time.perf_counter()
    c10d.wait_tensor(c10d.all_gather_into_tensor(own, ranks, mesh.groups[axis]))
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return largest([round(1e9 * (time.perf_counter() - began))])[0] / 1e9


def _one_digit(value: float) -> float:
    return float(f"{value:.0e}")
