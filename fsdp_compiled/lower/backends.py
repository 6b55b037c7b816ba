"""Who carries out what a program asks for: gloo or NCCL, BLAS or oneDNN. All ranks go by the same answer, because it
decides which program runs, and the last bits of what it computes.

Large float32 matrix products on a CPU:

| processor                        | library                                                            |
|----------------------------------|--------------------------------------------------------------------|
| AMD's (and Hygon's) with AVX-512 | oneDNN: MKL leaves AVX-512 aside there, and takes twice the time   |
| any other                        | PyTorch's own BLAS: MKL on Intel's is as fast                      |

A rule, and no measurement: ranks and runs that measure may come to different ends. Where hosts differ, rank 0's
processor decides. ``torch.backends.mkldnn.enabled = False``, PyTorch's own switch, on any rank leaves all to BLAS.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fsdp_compiled.lower.inductor import chooses_products

VENDORS = ("AuthenticAMD", "HygonGenuine")


@dataclass(frozen=True)
class Backends:
    """``gloo``: the axes whose collectives are gloo's. ``onednn``: whether large products on a CPU are oneDNN's.
    ``tuned``: whether Inductor was told to choose among kernels for each product itself."""

    gloo: tuple[str, ...] = ()
    onednn: bool = False
    tuned: bool = False


@dataclass(frozen=True)
class Host:
    """What one rank has to say: whether oneDNN may be used there, and whether its processor is better off with it."""

    allowed: bool
    favours: bool
    tuned: bool


def this_host() -> Host:
    allowed = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]
    capability, mkl = torch.backends.cpu.get_cpu_capability(), torch.backends.mkl.is_available()
    return Host(bool(allowed), favours_onednn(vendor(), capability, mkl), chooses_products())


def favours_onednn(vendor: str, capability: str, mkl: bool) -> bool:
    """The rule of the table above, of a processor and of whether PyTorch's BLAS is MKL."""
    return vendor in VENDORS and capability == "AVX512" and mkl


def decided(hosts: Sequence[Host], carriers: Mapping[str, str]) -> Backends:
    """Of what each rank has to say, by rank, and of who carries collectives along each axis."""
    onednn = hosts[0].favours and all(host.allowed for host in hosts)
    gloo = tuple(axis for axis, name in carriers.items() if name == "gloo")
    return Backends(gloo, onednn, any(host.tuned for host in hosts))


@cache
def vendor() -> str:
    """Who made this processor, as it says itself, ``"GenuineIntel"`` for one; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return next((name for name in VENDORS if name in platform.processor()), "")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
