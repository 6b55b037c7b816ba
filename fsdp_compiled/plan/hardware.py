"""What the machine is taken to do in a second: rough figures that choices of bucket and prefetch are made from.

They need not be exact, because a choice depends on ratios and is bounded on both sides; they must be the same on every
rank, because every rank makes the same program. So they come from the kind of device and from `Policy.bandwidth_gbps`,
never from a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HOST = 2e10  # PCIe 4.0 with 16 lanes, of 3.2e10 in theory


@dataclass(frozen=True)
class Machine:
    """Of one rank: floating-point operations and bytes of memory traffic a second, bytes a second over the network in
    each direction, and the seconds that a collective takes however little it carries.

    ``inner``: bytes a second along the tp axis, where that has wires of its own (inside a node); None: it has the
    network's. ``host``: bytes a second between a device and host memory, in each direction.
    """

    flops: float
    memory: float
    network: float
    latency: float
    inner: float | None = None
    host: float = HOST

    def transfer(self, nbytes: float, world: int, axis: str = "shard") -> float:
        """Seconds of an all-gather to, or a reduce-scatter from, ``nbytes`` in a ring of ``world`` ranks."""
        rate = self.inner if axis == "tp" and self.inner is not None else self.network
        return 0.0 if world == 1 else self.latency + nbytes * (world - 1) / world / rate

    def compute(self, flops: float, nbytes: float) -> float:
        """Seconds of an operator: bound by arithmetic or by memory, whichever is slower (the roofline model)."""
        return max(flops / self.flops, nbytes / self.memory)


# One core's share of a server; loopback or a shared segment; what one small gloo collective takes there.
CPU = Machine(flops=3e10, memory=8e9, network=1e9, latency=3e-4)
# An H100-class GPU at half of its peak in bfloat16; NVLink inside a node, eight GPUs' share of InfiniBand across nodes.
GPU = Machine(flops=4e14, memory=2.5e12, network=2e11, latency=2e-5)
ACROSS_NODES = 4e10
GPUS_A_NODE = 8


def machine_of(device: torch.device, world: int, bandwidth_gbps: float | None = None, tp: int = 1) -> Machine:
    """The figures for ranks on such a device; ``bandwidth_gbps`` replaces the network's, in 1e9 bits a second.

    ``tp``: the ranks along the tp axis, which are inside a node as far as they fit there.
    """
    found = CPU if device.type == "cpu" else GPU
    network = found.network if device.type == "cpu" or world <= GPUS_A_NODE else ACROSS_NODES
    if bandwidth_gbps is not None:
        network = bandwidth_gbps * 1e9 / 8
    inside = tp > 1 and (device.type == "cpu" or tp <= GPUS_A_NODE) and network != found.network
    return Machine(found.flops, found.memory, network, found.latency, found.network if inside else None)
