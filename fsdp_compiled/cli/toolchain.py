"""Whether Inductor can compile on this machine."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path


def choose_lower(*, cuda: bool) -> tuple[str, str | None]:
    """`--lower` when it was not given, and, where that is not inductor, one line that says why."""
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
