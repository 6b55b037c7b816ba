"""The speed of ranks and networks: the one model of time that `simulate`, `plan` and all ``"auto"`` choices use.

*Compute* is a roofline: an operator takes as long as its arithmetic or its traffic, whichever is longer, and no less
than a kernel. *Collectives* are rings, or trees for all-reduces, by the model that NCCL chooses them by: a latency of
the protocol, one for each hop inside a node and between nodes, and the time of the bytes on the slowest link.

    axes (replicate 4, shard 8, tp 2) on nodes of 8       tp: 2 neighbours            inside a node
                                                          shard: 4 a node, 2 nodes    2 rings share a node's NICs
                                                          replicate: 1 a node, 4      8 rings share them

Choices must be the same on every rank, because every rank makes the same program. So these figures come from the kind
of device and from `Policy.network`; where that says so, all ranks measured the network together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

GIB = 2**30
GBIT = 1e9 / 8  # bytes a second
HOST = 2e10  # PCIe 4.0 with 16 lanes, of 3.2e10 in theory


class Protocol(NamedTuple):
    """A protocol of NCCL. ``ring``, ``tree``: its base latency and those of a hop over NVLink and over the network, in
    seconds; ``data``: the part of a link's bytes that are data."""

    ring: tuple[float, float, float]
    tree: tuple[float, float, float]
    data: float


# NCCL 2.18 and later, `src/graph/tuning.cc`: ``baseLat``, ``hwLat``, and the bandwidth that a protocol leaves.
NCCL = (
    Protocol((6.6e-6, 0.6e-6, 2.7e-6), (6.8e-6, 0.6e-6, 5.0e-6), 0.5),  # LL
    Protocol((14e-6, 1.9e-6, 4.0e-6), (14e-6, 1.25e-6, 8.5e-6), 0.92),  # LL128
    Protocol((8.4e-6, 3.4e-6, 14e-6), (8.4e-6, 4e-6, 14e-6), 1.0),  # Simple
)
TREE = 0.92  # of a ring's rate, from the same file


@dataclass(frozen=True)
class Cluster:
    """Ranks of one kind in nodes that are alike; all figures are what is achieved, not what is promised.

    ``flops``: operations a second of large matrix products, by dtype; float32's for other dtypes. ``attention``: the
    part of ``flops`` that fused attention reaches. ``memory``: bytes of traffic of a fused kernel a second. ``eager``:
    the part of ``memory`` that PyTorch's own element-wise kernels reach. ``network``: bytes a second from and to a
    node, over all its NICs. ``inner``: bytes a second from and to a rank inside its node; None: as ``network``.
    ``node``: ranks of a node. ``latency``: seconds that a collective takes however little it carries; None: by NCCL's
    model. ``host``: bytes a second between a device and host memory, in each direction. ``launch``: seconds of the host
    for a kernel. ``kernel``: seconds of the shortest kernel. ``capacity``: bytes of memory that a step may use.
    ``peak``: promised operations a second in bfloat16, by which utilisation is counted. ``gpu``: whether programs are
    those of GPUs.
    """

    flops: float | Mapping[torch.dtype, float]
    memory: float
    network: float
    latency: float | None = None
    inner: float | None = None
    node: int = 1
    host: float = HOST
    attention: float = 1.0
    eager: float = 1.0
    launch: float = 0.0
    kernel: float = 0.0
    capacity: float | None = None
    peak: float | None = None
    gpu: bool = False
    name: str = "given"

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second of matrix products in this dtype."""
        if isinstance(self.flops, Mapping):
            return self.flops.get(dtype, self.flops[torch.float32])
        return self.flops

    def compute(self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32, part: float = 1.0) -> float:
        """Seconds of an operator: bound by arithmetic or by memory, whichever is slower (the roofline model). ``part``:
        the fraction of the usual rate of arithmetic that it reaches."""
        return max(flops / (self.rate(dtype) * part), nbytes / self.memory, self.kernel)

    def inside(self, ranks: int, stride: int = 1) -> bool:
        """Whether ranks along an axis are all in one node. ``stride``: how far apart neighbours are, by rank."""
        return ranks * stride <= self.node

    def link(self, ranks: int, stride: int = 1) -> float:
        """Bytes a second of a ring along such an axis, while all other rings along that axis send, too."""
        inner = self.inner if self.inner is not None else self.network
        if self.inside(ranks, stride):
            return inner
        return min(inner, self.network / min(stride, self.node)) if stride > 1 else min(inner, self.network)

    def wait(self, ranks: int, stride: int = 1) -> float:
        """Seconds of a gather that carries next to nothing."""
        return self.transfer(0.0, ranks, stride)

    def transfer(self, nbytes: float, ranks: int, stride: int = 1, both: bool = False) -> float:
        """Seconds of an all-gather that gives ``nbytes``, or a reduce-scatter of them; ``both``: of an all-reduce."""
        if ranks == 1:
            return 0.0
        moved, link = (1 + both) * nbytes * (ranks - 1) / ranks, self.link(ranks, stride)
        if self.latency is not None:
            return (1 + both) * self.latency + moved / link
        local = min(ranks, max(self.node // stride, 1))
        nodes = -(-ranks // local)
        found = []
        for protocol in NCCL:
            base, near, far = protocol.ring
            hops = (ranks - nodes) * near + (nodes - 1) * far
            found.append(base + (1 + both) * hops + moved / (link * protocol.data))
            if both:
                base, near, far = protocol.tree
                hops = (local - 1) * near + math.log2(nodes) * far
                found.append(base + 2 * hops + moved / (link * protocol.data * TREE))
        return min(found)


class Gpu(NamedTuple):
    """A GPU as its maker promises it: dense operations a second in bfloat16 and float32 (without TF32), bytes of memory
    traffic a second, GiB of memory (as nvidia-smi and rocm-smi print it), bytes a second to other GPUs of a node in
    each direction, and a node's NICs."""

    bf16: float
    fp32: float
    memory: float
    gib: float
    link: float
    nics: float
    like: str = "h100"  # the GPU whose `Achieved` fractions apply
    source: str = ""


GPUS: Mapping[str, Gpu] = {
    "a100-40": Gpu(312e12, 19.5e12, 1.555e12, 40, 3e11, 8 * 200 * GBIT, "a100", "NVIDIA A100 datasheet, SXM"),
    "a100": Gpu(312e12, 19.5e12, 2.039e12, 80, 3e11, 8 * 200 * GBIT, "a100", "NVIDIA A100 datasheet, SXM"),
    "h100": Gpu(989e12, 67e12, 3.35e12, 79.6, 4.5e11, 8 * 400 * GBIT, "h100", "NVIDIA H100 datasheet, SXM"),
    "h100-pcie": Gpu(756e12, 51e12, 2.0e12, 79.6, 6.4e10, 2 * 400 * GBIT, "h100", "NVIDIA H100 datasheet, PCIe 5.0"),
    "h200": Gpu(989e12, 67e12, 4.8e12, 140.4, 4.5e11, 8 * 400 * GBIT, "h100", "NVIDIA H200 datasheet, SXM"),
    "b200": Gpu(2250e12, 75e12, 7.7e12, 179.1, 9e11, 8 * 400 * GBIT, "h100", "NVIDIA HGX B200 datasheet"),
    "mi300x": Gpu(1307e12, 163.4e12, 5.3e12, 192, 4.48e11, 8 * 400 * GBIT, "mi300x", "AMD MI300X datasheet"),
    "l40s": Gpu(362e12, 91.6e12, 8.64e11, 45, 3.2e10, 2 * 200 * GBIT, "a100", "NVIDIA L40S datasheet"),
    "rtx4090": Gpu(165e12, 82.6e12, 1.008e12, 24, 3.2e10, 25 * GBIT, "a100", "NVIDIA Ada whitepaper"),
}
NAMES = {"a100-80": "a100", "h100-sxm": "h100", "4090": "rtx4090", "gpu": "h100"}


class Achieved(NamedTuple):
    """The fractions of a maker's promises that are reached: by large products; of these, by attention; and of memory's
    rate, by eager PyTorch's element-wise kernels. Fitted by ``python -m bench.published --fit``."""

    products: float
    attention: float
    eager: float


ACHIEVED = {
    "a100": Achieved(0.77, 0.90, 0.35),
    "h100": Achieved(0.69, 0.55, 0.35),
    "mi300x": Achieved(0.47, 0.55, 0.35),  # not fitted: SemiAnalysis, MI300X vs H100 vs H200, 2024: 620 of 1307e12
}
ERROR = (0.04, 0.33)  # of predicted seconds: the median and the worst of ``bench/results/published.json``, not fitted
JUDGED = ("a100", "a100-40", "h100")  # the GPUs of these runs, all of eager PyTorch
PEAK_ERROR = 0.05  # of a predicted peak: the bound to which tests hold it, against an allocator on a CPU
MEMORY = 0.85  # the part of memory's promised rate that one fused kernel reaches (STREAM's triad on these GPUs)
WIRE = 0.8  # the part of NVLink's and the NICs' promised rate that large collectives reach (NVIDIA/nccl-tests, busbw)
LAUNCH = 8e-6  # seconds of the host for an operator of eager PyTorch
KERNEL = 2e-6  # seconds of the shortest kernel in a CUDA graph
RESERVED = 2 * GIB  # bytes of a GPU's memory for CUDA's context, NCCL's buffers, cuBLAS's workspaces and fragments


def gpus(name: str, node: int = 8, nic: float | None = None) -> Cluster:
    """Nodes of a GPU of the table; ``nic``: bytes a second over all NICs of a node, if not the usual ones."""
    name = NAMES.get(name.lower().replace("_", "-"), name.lower().replace("_", "-"))
    if name not in GPUS:
        raise ValueError(f"No GPU {name!r} is known; expected one of {', '.join(sorted({*GPUS, *NAMES}))}.")
    gpu = GPUS[name]
    part = ACHIEVED[gpu.like]
    half = gpu.bf16 * part.products
    return Cluster(
        flops={torch.bfloat16: half, torch.float16: half, torch.float32: gpu.fp32 * part.products},
        memory=gpu.memory * MEMORY,
        eager=part.eager / MEMORY,
        network=(gpu.nics * min(node, 8) / 8 if nic is None else nic) * WIRE,
        inner=gpu.link * WIRE,
        node=node,
        attention=part.attention,
        launch=LAUNCH,
        kernel=KERNEL,
        capacity=gpu.gib * GIB - RESERVED,
        peak=gpu.bf16,
        gpu=True,
        name=name,
    )


def bits(text: str) -> float:
    """Bytes a second of ``"400Gb/s"``, ``"8x400Gb/s"``, or ``"50GB/s"``, which are bytes."""
    found = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\d+(?:\.\d+)?)\s*((?i:[gt]b/s|[gt]bps|gbit/s))?", text.strip())
    if found is None or float(found[2]) == 0:
        raise ValueError(f"{text!r} is no rate; expected one such as 400Gb/s, or 8x400Gb/s for a node with eight NICs.")
    unit = found[3] or ""
    each = GBIT * (1000 if unit[:1] in ("t", "T") else 1) * (8 if unit[1:] in ("B/s", "Bps") else 1)
    return int(found[1] or 1) * float(found[2]) * each


# One core's share of a server; loopback or a shared segment; what one small gloo collective takes there.
CPU = Cluster(flops=3e10, memory=8e9, network=1e9, latency=3e-4, name="cpu")
GPU = gpus("h100")
HARDWARE: Mapping[str, Cluster] = {"cpu": CPU, **{name: gpus(name) for name in (*GPUS, *NAMES)}}


Told = float | tuple[float, float] | str | None  # `Policy.network`


def machine_of(device: torch.device, network: Told = None, tp: int = 1) -> Cluster:
    """The figures for ranks on such a device. ``network``: `Policy.network`, which replaces the usual figure; then the
    ``tp`` ranks along the tp axis are taken to be inside a node."""
    return with_network(CPU if device.type == "cpu" else GPU, network, tp)


def with_network(found: Cluster, network: Told, tp: int) -> Cluster:
    if network is None or isinstance(network, str):  # "measure" is done where there are ranks
        return found
    gbps, latency = network if isinstance(network, tuple) else (network, None)
    inner = found.inner if found.inner is not None else found.network
    latency = found.latency if latency is None else latency / 1e3
    return replace(found, network=gbps * GBIT * tp, inner=inner, node=tp, latency=latency)
