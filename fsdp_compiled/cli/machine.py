"""The machine: the processor, the GPUs, the versions of what runs; and whether Inductor can compile on it."""

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
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
    """The versions of this package, torch, Python, the system, and other packages by name."""
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


def choose_lower(*, cuda: bool) -> tuple[str, str | None]:
    """The choice of `--lower` if it was not given, and, if that is not inductor, one line that says why."""
    missing = _missing(cuda)
    if missing is None:
        return "inductor", None
    return "eager", f"--lower eager: inductor needs {missing}, which this machine lacks"


def _missing(cuda: bool) -> str | None:
    if cuda and importlib.util.find_spec("triton") is None:
        return "triton"
    # Triton builds its launchers in C, Inductor its CPU kernels in C++, and both include Python's own header.
    if cuda:
        names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    else:
        names = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    if not any(name and shutil.which(name) for name in names):
        return "a C compiler (gcc)" if cuda else f"a C++ compiler ({names[0]})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's C headers (Python.h)"
    return None
