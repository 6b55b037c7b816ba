"""A GPU that captures graphs: each `Sharded` has a stream of its own, and a pool for its graphs' memory.

This is the only file that touches CUDA graphs. Written against the sources of torch 2.11 to 2.13 (``CUDAGraph.cpp``,
``CUDACachingAllocator.cpp``); the pool is kept alive and warmed up as ``torch._inductor.cudagraph_trees`` does it. What
those sources do, and what follows here:

- A pool lives while it has a user: each graph captured in it, and each period in which a thread takes its memory. A
  pool that has lost its last user may not be used again, so an empty graph (``keeper``) is its first user.
- Before pull request 180395 (torch 2.11, 2.12), a capture that CUDA broke off leaves two allocators, of device and of
  pinned memory, taking memory from the pool. Python can only tell the first that the capture ended, and a new capture
  in that pool is refused. So no capture follows in a pool in which one broke.
- A capture that broke off stays a user of its pool (until issue 190348). It is removed when the pool is given back,
  and only where the allocator shows that it is there: memory that nobody uses, and that emptying the cache leaves.
- The generator counts as captured until some capture ends. An empty capture, in a pool of its own, resets it.
- cuBLAS has a workspace for each stream, part of the graphs on it; destroying one of them frees it (issue 193402). So
  no two `Sharded` share a stream, a stream goes with its pool, and the workspace is made in the pool: memory that the
  pool's other graphs keep.
- While memory is taken from a pool, the allocator does not give back what other pools cache (issue 175015). So the
  cache is emptied before a program's first call.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_compiled.torch_private.modes import C
from fsdp_compiled.torch_private.names import missing

STREAMS = 32  # the number of streams that torch hands out, by turns
log = logging.getLogger("fsdp_compiled")


@dataclass(eq=False)
class CapturePool:
    """Where graphs are captured: the stream, the pool, and the empty graph that keeps the pool."""

    stream: torch.cuda.Stream
    pool: Any
    keeper: torch.cuda.CUDAGraph
    broken: int = 0  # captures that CUDA broke off here


_streams: weakref.WeakValueDictionary[tuple[int, int], CapturePool] = weakref.WeakValueDictionary()  # (device, stream)
# Graphs whose capture broke off: the allocator of pinned memory may ask them for ever whether they are being captured.
_asked: list[torch.cuda.CUDAGraph] = []


class CudaGraphs:
    """What a capture needs from a GPU; tests replace it by one that runs on the CPU."""

    capturable = frozenset({"nccl"})  # kinds of process groups whose collectives may be captured

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._place: CapturePool | None = None
        self._left: list[CapturePool] = []  # in which a capture broke off; earlier graphs may still be there
        self._lost = ""

    def obstacle(self, collectives: bool) -> str:
        """Why nothing can be captured on this device as it is set up; empty where it can."""
        if self._lost:
            return self._lost
        if gone := missing("graphs' pools"):
            return f"this PyTorch has no {gone[0]}."
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            return (
                f"memory comes from the {backend} allocator, which has no pools that a graph shares with calls before "
                "it. Start without backend:... in PYTORCH_CUDA_ALLOC_CONF."
            )
        if self._place is None and self._held() >= STREAMS:
            gc.collect()  # objects that are no longer reachable may still hold some
            if self._held() >= STREAMS:
                return f"{STREAMS} others hold a stream for graphs, and torch has no more. Call close() on some."
        if collectives and os.environ.get("NCCL_GRAPH_REGISTER") != "0" and _expandable():
            return (
                "the allocator has expandable segments, whose addresses NCCL cannot register with a graph. Start with "
                "NCCL_GRAPH_REGISTER=0, or without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF."
            )
        return ""

    def make_room(self) -> None:
        """Gives back memory that is cached and not used, before a program takes its own from the graphs' pool."""
        torch.cuda.empty_cache()

    def warm(self, run: Callable[[], Any]) -> Any:
        """Runs the function for real, on the stream and with the memory of a capture."""
        place = self._ready()
        current = torch.cuda.current_stream(self.device)
        place.stream.wait_stream(current)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(place.stream), self._taking(place.pool):
                results = run()
        except BaseException:
            with suppress(RuntimeError):  # the error above is the one to tell
                current.wait_stream(place.stream)  # work that has begun may still write
            raise
        current.wait_stream(place.stream)
        return results

    def capture(self, run: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
        """Captures the function's work as a graph, without doing the work."""
        place = self._ready()
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream, which the inner one does not do on an error.
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                _capturing(graph, place.pool, place.stream),
            ):
                results = run()
        except BaseException as error:
            self._recover(graph, place)
            # The end of a broken capture raises an error about the end; the error before it is what broke the capture.
            if isinstance(error, RuntimeError) and isinstance(error.__context__, RuntimeError):
                raise error.__context__ from None
            raise
        return results, graph

    def random_state(self) -> Callable[[], None]:
        """Returns a function that restores the random generator's current state."""
        state = torch.cuda.get_rng_state(self.device)
        return lambda: torch.cuda.set_rng_state(state, self.device)

    def release(self) -> None:
        """Gives back the memory that graphs had; called when no graph is left."""
        places = [*self._left, *([self._place] if self._place is not None else [])]
        self._left, self._place = [], None
        if not places:
            return
        with suppress(RuntimeError), torch.cuda.device(self.device):  # of a GPU that is lost to this process
            for place in places:
                place.keeper.reset()
            torch.cuda.empty_cache()
            for place in places:
                for _ in range(place.broken):
                    if not self._is_kept_for_nobody(place.pool):
                        break
                    C._cuda_releasePool(self._index, place.pool)
                    torch.cuda.empty_cache()

    @property
    def _index(self) -> int:
        return self.device.index if self.device.index is not None else torch.cuda.current_device()

    @contextmanager
    def _taking(self, pool: Any) -> Iterator[None]:
        """Inside, this thread takes its memory from the pool."""
        C._cuda_beginAllocateCurrentThreadToPool(self._index, pool)
        try:
            yield
        finally:
            C._cuda_endAllocateToPool(self._index, pool)
            C._cuda_releasePool(self._index, pool)

    def _ready(self) -> CapturePool:
        """The stream and the pool, created at first use."""
        if self._place is None:
            with torch.cuda.device(self.device), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the empty keeper
                torch.cuda.synchronize()
                stream, pool, keeper = self._own_stream(), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
                stream.wait_stream(torch.cuda.current_stream())
                with _capturing(keeper, pool, stream):
                    pass
                self._place = _streams[self._index, stream.cuda_stream] = CapturePool(stream, pool, keeper)
                with torch.cuda.stream(stream), self._taking(pool):
                    torch.cuda.current_blas_handle()  # this call makes the workspace
        return self._place

    def _held(self) -> int:
        return sum(index == self._index for index, _ in _streams)

    def _own_stream(self) -> torch.cuda.Stream:
        # Of normal priority, which NCCL's are not (`process_group.set_nccl`): those come from another pool.
        for _ in range(2 * STREAMS):
            stream = torch.cuda.Stream()
            if (self._index, stream.cuda_stream) not in _streams:
                return stream
        raise RuntimeError(f"all {STREAMS} streams of torch are held for graphs of others. Close some of them.")

    def _recover(self, graph: torch.cuda.CUDAGraph, place: CapturePool) -> None:
        """After a capture that broke off: this process can go on, and capture again, in another place."""
        graph.reset()
        _asked.append(graph)
        with suppress(RuntimeError):  # already told, where torch is newer or the fault was not CUDA's
            C._cuda_endAllocateToPool(self._index, place.pool)
        place.broken += 1
        self._left.append(place)
        self._place = None
        try:
            with warnings.catch_warnings(), torch.cuda.device(self.device):
                warnings.simplefilter("ignore")  # about the empty graph
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    _capturing(torch.cuda.CUDAGraph(), None, place.stream),
                ):
                    pass
        except RuntimeError as error:
            self._lost = f"a capture was broken off, and since then none begins ({str(error).splitlines()[0]})."
            log.error("%s Random numbers on the GPU may be refused from here on: start again.", self._lost)

    def _is_kept_for_nobody(self, pool: Any) -> bool:
        """Whether the pool still holds unused memory after the cache was emptied."""
        return any(
            segment["device"] == self._index and not segment["active_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool)
        )


def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.graph:
    # Other threads (a loader that pins memory, NCCL's watchdog) may make calls that a capture forbids its own thread.
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


def _expandable() -> bool:
    settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    if any("expandable_segments:true" in setting.replace(" ", "").lower() for setting in settings):
        return True
    return any(segment.get("is_expandable", False) for segment in torch.cuda.memory_snapshot())


def environment() -> str:
    """What a report of a problem here should name."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {device}."
