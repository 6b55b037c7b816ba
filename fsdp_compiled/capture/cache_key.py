"""What decides of traced and compiled code besides the code itself: versions, global settings, the machine.

Whatever is kept on disk is kept under these too. A setting too many costs a compilation that was not needed; one too
few runs the wrong code.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import backends

from fsdp_compiled.capture.global_modes import now
from fsdp_compiled.torch_private.functorch import config
from fsdp_compiled.torch_private.modes import is_in_torch_dispatch_mode, saved_tensors_hooks


def settings() -> str:
    """Equal where tracing or compiling the same would give the same."""
    found = {**versions(), **_modes(), **_machine()}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def others() -> bool:
    """Whether code of the user's takes part in what is traced here: a dispatch mode, or hooks for saved tensors."""
    return is_in_torch_dispatch_mode() or saved_tensors_hooks(True) is not None


@functools.cache
def versions() -> dict[str, Any]:
    root = Path(__file__).parent.parent  # the package
    sources = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root / "kernels").glob("*.py")]):  # rglob does not follow the link
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return {
        "sources": sources.hexdigest(),
        "torch": (torch.__version__, torch.version.git_version),
        "python": sys.version_info[:2],
    }


def _modes() -> dict[str, Any]:
    """How operators are dispatched, differentiated, typed and chosen."""
    einsum = backends.opt_einsum
    return {
        "modes": now(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "functorch": config.get_hash(),
        "einsum": (einsum.is_available(), einsum.enabled, einsum.strategy),  # type: ignore[attr-defined]
        "quantized": backends.quantized.engine,
    }


def _machine() -> dict[str, Any]:
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return {
        "cpu": (backends.cpu.get_cpu_capability(), torch.get_num_threads()),
        "gpu": None if index is None else (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)),
    }
