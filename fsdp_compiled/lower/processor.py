"""What this processor can do."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def instructions() -> list[str]:
    """The extensions of this processor, of which compiled code may use any (``-march=native``)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({word for line in lines if line.startswith(("flags", "Features")) for word in line.split()[2:]})
