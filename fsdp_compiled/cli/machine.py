"""What a figure was measured on: the processor, the GPUs, the versions of what ran."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def hardware() -> str:
    """``2 cores, AMD EPYC``, and the GPUs if there are any."""
    text = f"{os.cpu_count()} cores, {processor()}"
    if count := torch.cuda.device_count():
        text += f", {count} x {torch.cuda.get_device_name(0)}"
    return text


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions(*others: str) -> dict[str, str]:
    """Of this package, torch, Python, the system, and other packages by name."""
    return {
        "fsdp-compiled": _version("fsdp-compiled"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in others},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a bare clone
        return "not installed"
