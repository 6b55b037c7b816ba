"""What one step of a rival does, read off PyTorch's profiler: collectives, operators, and bytes.

Memory on a CPU is what PyTorch's allocator hands out: the profiler runs from before a rival is built, so that the sum
of all its allocations and frees is what the rival holds at any time, weights, gradients and optimizer state included.
What the rival holds between steps is the sum at the last step's beginning, its peak the largest sum within the step.
Memory that gloo or the compiler take outside of that allocator is not in it. On a GPU the allocator itself is asked.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.network import slow_network

MARK = "fsdp-compiled bench step"
CPU = [ProfilerActivity.CPU]
LINGER = 1e-2  # seconds; more than a thread waits for its turn on a machine that others use too
NOT_DATA = ("c10d::barrier", "c10d::monitored_barrier_", "c10d::send")  # what is sent is counted where it is received


@dataclass(frozen=True)
class Seen:
    """Of one step on one rank."""

    peak_bytes: int
    held_bytes: int  # between steps
    grown_bytes: int  # held more than a step earlier; not zero: something leaks, or escaped the profiler
    collectives: int
    operators: int  # calls of ATen operators, those that others call included; a compiled piece is none

    def facts(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Event:
    """What is needed of the profiler's own."""

    name: str
    start: int  # ns
    end: int
    size: int = 0  # bytes; negative when freed


class Observer:
    """Watches a rival from before it is built; `step` marks its steps, the last of which is reported."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: Seen | None = None
        self._peaks: list[tuple[int, int]] = []  # on a GPU: held at a step's beginning, and its peak

    @contextmanager
    def watching(self) -> Iterator["Observer"]:
        on_cpu = self.device.type == "cpu"
        base = 0 if on_cpu else torch.cuda.memory_allocated(self.device)
        # acc_events says nothing here, but without it torch 2.11 warns of cycles that there are none of.
        # The profiler sees what this thread frees, so what gloo holds must not be left for gloo's to free.
        lingering = slow_network(math.inf, linger=LINGER) if on_cpu else nullcontext()
        with lingering, profile(activities=CPU, profile_memory=on_cpu, acc_events=True) as profiled:
            yield self
        results = profiled.profiler.kineto_results  # type: ignore[union-attr]
        self.seen = read(event(raw) for raw in results.events())
        if self._peaks:
            (before, _), (held, peak) = self._peaks[-2:]
            counts = self.seen
            self.seen = Seen(peak - base, held - base, held - before, counts.collectives, counts.operators)

    def step(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.device.type == "cpu":
            with record_function(MARK):
                return run()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        held = torch.cuda.memory_allocated(self.device)
        with record_function(MARK):
            result = run()
        torch.cuda.synchronize(self.device)
        self._peaks.append((held, torch.cuda.max_memory_allocated(self.device)))
        return result


def event(raw: Any) -> Event:
    start = raw.start_ns()
    return Event(raw.name(), start, start + raw.duration_ns(), raw.nbytes())


def read(events: Iterable[Event]) -> Seen:
    """Of all that happened since before the rival was built, what its last step did."""
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    steps = [event for event in ordered if event.name == MARK]
    if len(steps) < 2:
        raise ValueError(f"A rival is observed over two steps at least; the profiler saw {len(steps)}.")
    before, last = steps[-2:]
    inside = [event for event in ordered if last.start <= event.start <= last.end]
    held, peak = _held(ordered, last.start), 0
    now = held
    for one in inside:
        if one.name == "[memory]":
            now += one.size
            peak = max(peak, now)
    return Seen(
        peak_bytes=max(peak, held),
        held_bytes=held,
        grown_bytes=held - _held(ordered, before.start),
        collectives=_collectives(inside),
        operators=sum(one.name.startswith("aten::") for one in inside),
    )


def _collectives(ordered: Iterable[Event]) -> int:
    """How many there are; one that is called within another is the same, on the simulated network's way to gloo."""
    count, end = 0, -1
    for one in ordered:
        if one.name.startswith("c10d::") and one.name not in NOT_DATA and one.end > end:
            count, end = count + 1, one.end
    return count


def _held(ordered: Sequence[Event], until: int) -> int:
    return sum(event.size for event in ordered if event.name == "[memory]" and event.start < until)
