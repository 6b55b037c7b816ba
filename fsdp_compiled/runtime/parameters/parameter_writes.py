"""What the user wrote to parameters between calls, as a number that ranks compare: one that wrote alone is found out.

    each rank has a part of a parameter    operators are counted, by name and parameter, where they run
    each rank has all of it (ddp)          PyTorch's counters of writes to the buffers, from one call's end to the next
    one rank                               nothing

Ranks compare it in a step, before anything is updated (`passes.report`), and where they meet: to save, to read a
parameter whole. Order does not count, so that the same write on the ranks that lack it makes them alike again.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from zlib import crc32

import torch

from fsdp_compiled.distributed.call_store import WRITES

version = attrgetter("_version")
BITS = 40


class Writes:
    """``total``: of all writes. ``shards``: by buffer key, where each rank has all of them and there are several."""

    def __init__(self, shards: Mapping[str, torch.Tensor] | None = None) -> None:
        self.total = 0
        self.shards = shards
        self._seen = 0

    def add(self, operator: str, name: str) -> None:
        """One operator that wrote to one parameter."""
        self.total = (self.total + crc32(f"{operator} {name}".encode())) % 2**BITS

    def begin(self) -> None:
        """A call begins: what was written since the last one was the user's."""
        if self.shards is not None:
            self.total = (self.total + self._count() - self._seen) % 2**BITS
            self._seen = self._count()

    def end(self) -> None:
        """A call is over: what was written in it was not."""
        if self.shards is not None:
            self._seen = self._count()

    def _count(self) -> int:
        assert self.shards is not None
        return sum(map(version, self.shards.values()))

    def __str__(self) -> str:
        """What is appended to a call's label."""
        return f"{WRITES}{self.total:x}" if self.total else ""
