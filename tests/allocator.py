"""What a step really allocates, seen from outside the package: the CPU allocator's own events, and gathered buffers.

`record` listens to every allocation and free that the CPU allocator makes, temporaries inside kernels and inside gloo's
threads included. `Gathers` follows the results of all-gathers from the call that makes them to the moment their memory
is freed, under any lowering.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Event:
    """One allocation (positive bytes) or free (negative); ``within``: the operators that it happened in, outermost
    first."""

    nbytes: int
    address: int
    within: tuple[str, ...]


@dataclass
class Recording:
    """The allocator's events between two points, in the order of time."""

    events: list[Event] = field(default_factory=list)

    @property
    def live(self) -> list[int]:
        """Bytes alive after each event, counted from the start of the recording."""
        return list(accumulate(event.nbytes for event in self.events))

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once, beyond those there were at the start."""
        return max([0, *self.live])

    @property
    def kept(self) -> int:
        """Bytes that were allocated and not freed."""
        return sum(event.nbytes for event in self.events)

    def at_peak(self) -> list[Event]:
        """The allocations alive at the peak, largest first."""
        alive: dict[int, Event] = {}
        live = self.live
        stop = live.index(max(live)) + 1 if live else 0
        for event in self.events[:stop]:
            if event.nbytes > 0:
                alive[event.address] = event
            else:
                alive.pop(event.address, None)
        return sorted(alive.values(), key=lambda event: -event.nbytes)


@contextmanager
def record() -> Iterator[Recording]:
    """Fills a `Recording`, once the block has ended, with what the CPU allocator did inside it."""
    recording = Recording()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield recording
    found: list[tuple[int, int, Event]] = []

    def visit(node: Any, within: tuple[str, ...]) -> None:
        if node.name == "[memory]":
            fields = node.extra_fields
            found.append((node.start_time_ns, len(found), Event(fields.alloc_size, fields.ptr, within)))
        for child in node.children:
            visit(child, (*within, node.name))

    for root in profiler.profiler.kineto_results.experimental_event_tree():
        visit(root, ())
    recording.events = [event for *_, event in sorted(found, key=lambda item: item[:2])]


def held(values: Any) -> int:
    """Bytes of the storages behind the tensors of a pytree, each counted once."""
    storages = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def let_go(least: float = 0.0) -> None:
    """Returns when no thread of gloo runs, or would, were there a processor for it; on Linux, within five seconds."""
    time.sleep(least)
    until = time.monotonic() + 5
    while time.monotonic() < until and any(map(_is_gloo_at_work, Path("/proc/self/task").glob("*"))):
        time.sleep(1e-3)


def _is_gloo_at_work(thread: Path) -> bool:
    with suppress(OSError):  # it has ended
        if "gloo_runloop" in (thread / "comm").read_text():
            return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


class Waited(TorchDispatchMode):
    """While active, a collective has come to its end before it is waited for, and gloo has let go of it after that.

    Else a thread of gloo may be the last to drop a buffer, and what it frees then is not told to the profiler.
    """

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not torch.ops._c10d_functional.wait_tensor.default:
            return function(*args, **(kwargs or {}))
        let_go(0.005)
        result = function(*args, **(kwargs or {}))
        let_go()
        return result


class Gathers(TorchDispatchMode):
    """While active, counts the all-gathers whose results are in memory: ``alive`` now, ``most`` at once.

    One that several buffers crossed together counts as one, until the last of them is freed.
    """

    TARGETS = (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.timeline: list[int] = []  # how many were alive after each gather started and each was freed

    @property
    def alive(self) -> int:
        return self.timeline[-1] if self.timeline else 0

    @property
    def most(self) -> int:
        return max(self.timeline, default=0)

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self.TARGETS:
            storages = [tensor.untyped_storage() for tensor in pytree.tree_leaves(result)]
            left = len(storages)

            def freed() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    self.timeline.append(self.alive - 1)

            self.timeline.append(self.alive + 1)
            for storage in storages:
                weakref.finalize(storage, freed)
        return result
