"""torch.cuda's graphs and allocator as PyTorch's sources say, counted instead of done; for machines without a GPU.

``CUDAGraph.cpp`` and ``CUDACachingAllocator.cpp`` as of three times: "2.11" (as 2.12), where a capture that breaks off
tells neither allocator of its end; "2.13" (pull request 180395), where it tells both; "2.14" (issue 190348), where
destroying it also takes it off the users of its pool. A pool that nobody uses must not be used again; memory is one
segment a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

Pool = tuple[int, int]
DEFAULT: Pool = (0, 0)
WORKSPACE = 32


@dataclass
class Segment:
    pool: Pool
    size: int
    active: bool = True


@dataclass
class Cuda:
    """Takes the place of what `cuda_device` calls; ``log`` has the captures and the resets in order."""

    patch: pytest.MonkeyPatch
    version: str = "2.13"
    backend: str = "native"
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segments: list[Segment] = []
        self.users: dict[Pool, int] = {}
        self.underway: list[Pool] = []  # in the device's allocator
        self.pinned: list[Pool] = []  # in that of pinned memory
        self.taking: list[Pool] = []  # of this thread
        self.workspaces: dict[int, Segment] = {}  # by stream
        self.generator_is_captured = False
        self.capturing: Any = None
        self.pools = self.streams = 0
        self.stream = Stream(self, 0)
        self.install()

    def install(self) -> None:
        cuda = self

        class Graph:
            def __init__(self) -> None:
                self.pool: Pool | None = None
                self.ended = self.broken = False
                self.stream: Stream | None = None

            def reset(self) -> None:
                cuda.log.append("reset")
                if self.pool is not None and (self.ended or cuda.version == "2.14"):
                    cuda.release(0, self.pool)
                    self.pool = None
                if self.ended and self.stream is not None and cuda.version != "2.11":
                    if (workspace := cuda.workspaces.pop(self.stream.cuda_stream, None)) is not None:
                        workspace.active = False
                self.ended = False

            def __del__(self) -> None:
                self.reset()

        @contextmanager
        def graph(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
            assert capture_error_mode == "thread_local"
            cuda.log.append("capture" if pool is not None else "capture in a pool of its own")
            if pool is None:
                cuda.pools += 1
            pool = pool if pool is not None else (cuda.pools, 0)
            cuda.begin(0, pool)
            if pool in cuda.pinned:
                raise RuntimeError(f"begin_allocate_to_pool: already recording to mempool_id {pool}")
            cuda.pinned.append(pool)
            cuda.generator_is_captured = True
            graph.pool, graph.stream = pool, stream
            cuda.capturing, before, cuda.stream = graph, cuda.stream, stream
            cuda.taking.append(pool)
            try:
                yield
            finally:
                cuda.taking.pop()
                cuda.capturing = None
                if graph.broken and cuda.version == "2.11":
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.end(0, pool)
                cuda.pinned.remove(pool)
                if graph.broken:
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.generator_is_captured = False
                graph.ended = True
                cuda.stream = before

        @contextmanager
        def stream(stream: Stream) -> Iterator[None]:
            before, cuda.stream = cuda.stream, stream
            try:
                yield
            finally:
                cuda.stream = before

        @contextmanager
        def device(_: Any) -> Iterator[None]:
            yield

        def new_stream() -> Stream:
            cuda.streams += 1
            return Stream(cuda, 1 + cuda.streams % 32)

        def handle() -> Pool:
            cuda.pools += 1
            return 0, cuda.pools

        def workspace() -> None:
            if cuda.stream.cuda_stream not in cuda.workspaces:
                cuda.workspaces[cuda.stream.cuda_stream] = cuda.allocate(WORKSPACE)

        def snapshot() -> list[dict[str, Any]]:
            return [
                {"device": 0, "active_size": s.size * s.active, "segment_pool_id": s.pool, "is_expandable": False}
                for s in cuda.segments
            ]

        for name, value in {
            "CUDAGraph": Graph, "graph": graph, "stream": stream, "Stream": new_stream, "graph_pool_handle": handle,
            "device": device, "current_stream": lambda device=None: cuda.stream, "synchronize": lambda: None,
            "empty_cache": cuda.empty_cache, "memory_snapshot": snapshot, "current_blas_handle": workspace,
            "get_allocator_backend": lambda: cuda.backend,
        }.items():  # fmt: skip
            self.patch.setattr(torch.cuda, name, value)
        for name, call in {
            "_cuda_beginAllocateCurrentThreadToPool": self.begin_here, "_cuda_endAllocateToPool": self.end_here,
            "_cuda_releasePool": self.release,
        }.items():  # fmt: skip
            self.patch.setattr(torch._C, name, call, raising=False)

    # The allocator.

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def allocate(self, size: int) -> Segment:
        pool = self.taking[-1] if self.taking else DEFAULT
        free = (s for s in self.segments if s.pool == pool and not s.active and s.size >= size)
        if (segment := next(free, None)) is None:
            segment = Segment(pool, size)
            self.segments.append(segment)
        segment.active = True
        return segment

    def begin(self, _: int, pool: Pool) -> None:
        assert self.users.get(pool, 1) > 0, "it->second->use_count > 0 INTERNAL ASSERT FAILED"
        self.users[pool] = self.users.get(pool, 0) + 1
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.underway.append(pool)

    def end(self, _: int, pool: Pool) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def begin_here(self, device: int, pool: Pool) -> None:
        self.begin(device, pool)
        self.taking.append(pool)

    def end_here(self, device: int, pool: Pool) -> None:
        self.end(device, pool)
        if pool in self.taking:
            self.taking.remove(pool)

    def release(self, _: int, pool: Pool) -> None:
        assert pool in self.users, "it != graph_pools.end() INTERNAL ASSERT FAILED"
        self.users[pool] -= 1
        assert self.users[pool] >= 0, "uc >= 0 INTERNAL ASSERT FAILED"

    def empty_cache(self) -> None:
        self.log.append("empty")
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
        assert all(users >= 0 for users in self.users.values())
        self.segments = [s for s in self.segments if s.active or self.users.get(s.pool, 0) > 0]
        kept = {segment.pool for segment in self.segments}
        self.users = {pool: users for pool, users in self.users.items() if users or pool in kept}

    # What a program does.

    def draws(self) -> None:
        if self.generator_is_captured and self.capturing is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def reads(self) -> None:
        """Waits for the device, which breaks a capture off."""
        if self.capturing is not None:
            self.capturing.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def program(self, size: int = 1000, reads: bool = False) -> Callable[[], int]:
        """One that works with so much memory, draws, and perhaps reads a number on the host."""

        def run() -> int:
            block = self.allocate(size)
            try:
                self.draws()
                if reads:
                    self.reads()
            finally:
                block.active = False
            return size

        return run


@dataclass
class Stream:
    cuda: Cuda
    cuda_stream: int

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.cuda_stream} waits for {other.cuda_stream}")
