"""What the machine is taken to do in a second: rough figures that choices of bucket and prefetch are made from.

They need not be exact, because a choice depends on ratios and is bounded on both sides; they must be the same on every
rank, because every rank makes the same program. So they come from the kind of device and from `Policy.bandwidth_gbps`,
never from a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """Of one rank: floating-point operations and bytes of memory traffic a second, bytes a second over the network in
    each direction, and the seconds that a collective takes however little it carries."""

    flops: float
    memory: float
    network: float
    latency: float

    def transfer(self, nbytes: float, world: int) -> float:
        """Seconds of an all-gather to, or a reduce-scatter from, ``nbytes`` in a ring of ``world`` ranks."""
        return 0.0 if world == 1 else self.latency + nbytes * (world - 1) / world / self.network

    def compute(self, flops: float, nbytes: float) -> float:
        """Seconds of an operator: bound by arithmetic or by memory, whichever is slower (the roofline model)."""
        return max(flops / self.flops, nbytes / self.memory)


# One core's share of a server; loopback or a shared segment; what one small gloo collective takes there.
CPU = Machine(flops=3e10, memory=8e9, network=1e9, latency=3e-4)
# An H100-class GPU at half of its peak in bfloat16; NVLink inside a node, eight GPUs' share of InfiniBand across nodes.
GPU = Machine(flops=4e14, memory=2.5e12, network=2e11, latency=2e-5)
ACROSS_NODES = 4e10
GPUS_A_NODE = 8


def machine_of(device: torch.device, world: int, bandwidth_gbps: float | None = None) -> Machine:
    """The figures for ranks on such a device; ``bandwidth_gbps`` replaces the network's, in 1e9 bits a second."""
    found = CPU if device.type == "cpu" else GPU
    network = found.network if device.type == "cpu" or world <= GPUS_A_NODE else ACROSS_NODES
    if bandwidth_gbps is not None:
        network = bandwidth_gbps * 1e9 / 8
    return Machine(found.flops, found.memory, network, found.latency)
