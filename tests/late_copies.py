"""`torch.cuda`'s streams and events on a CPU: a copy beside compute runs as late as it may.

What is told to another stream than compute's waits in a row, and runs when compute waits for an event behind it. What
it reads and writes must be alive then: memory that was freed sooner would be another's on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.kernels import host_copies
from fsdp_compiled.lower import trials


class Freed(AssertionError):
    """A copy that was under way reads or writes memory that is another's by now."""


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.row: list[Any] = []
        self.begun_behind: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.begun_behind.append(other)

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "an event that was never recorded"
        event.stream.run(event.place)

    def synchronize(self) -> None:
        self.run(len(self.row))

    def run(self, place: int) -> None:
        for index in range(place):
            if self.row[index] is not None:
                call, self.row[index] = self.row[index], None
                call()


class Event:
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.row)


class _Late(TorchDispatchMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default and len(self.stream.begun_behind) == len(self.stream.row) + 1
        target, source = map(weakref.ref, args[:2])

        def call() -> None:
            if target() is None or source() is None:
                raise Freed(str(func))
            target().copy_(source())  # type: ignore[union-attr]

        self.stream.row.append(call)
        return args[0]


@contextmanager
def late_copies() -> Iterator[list[Stream]]:
    """Inside, a CPU's copies are made as on a GPU; the streams that they go over."""
    compute, made = Stream(), list[Stream]()

    def new(device: Any) -> Stream:
        made.append(Stream())
        return made[-1]

    cuda = mock.Mock(Stream=new, Event=Event, current_stream=lambda _: compute, stream=_Late)
    lanes: dict[torch.device, Any] = {}
    trials._copies_failure.cache_clear()
    with (
        mock.patch.object(host_copies, "IN_ORDER", set()),
        mock.patch.object(host_copies, "LANES", lanes),
        mock.patch.object(host_copies, "cuda", cuda),
    ):
        yield made
    trials._copies_failure.cache_clear()
