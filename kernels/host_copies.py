"""Copies to host memory and back, beside a device's compute, as operators: what starts is waited for later.

    room = store_(room, value)           the copy to the host starts
    ...                                  compute that leaves ``value`` as it is
    room = stored(room, value)           compute goes on once it has ended; ``value`` may be freed from here on
    ...
    value = restore(room, device)        the copy back starts, into new memory
    ...
    value = restored(value, room)        compute goes on once it has ended

A *room* is pinned host memory at a fixed address, so that a CUDA graph can hold it. On a GPU copies go over two streams
of their own, one each way, in the order in which they start. A copy starts behind what compute was told before it, and
new memory is compute's own: the allocator needs to know nothing of those streams. What reads what another copy wrote
starts behind compute's wait for that. Nothing waits on the host. Elsewhere, and on a GPU where a trial fails
(`failure`), each copy is where it starts, in compute's own order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import cuda

_LIBRARY = torch.library.Library("fsdp_compiled", "FRAGMENT")
_SCHEMAS = {
    "store_": "(Tensor(a!) room, Tensor value) -> Tensor(a!)",
    "stored": "(Tensor(a) room, Tensor value) -> Tensor(a)",
    "restore": "(Tensor room, Device device) -> Tensor",
    "restored": "(Tensor(a) value, Tensor room) -> Tensor(a)",
}
NAME = "store_"  # what a trial's failure goes by
SIZES = (1 << 22, 33, 1 << 20)  # elements, of a trial's copies
BUSY = 1024  # width of the products that a trial's copies run beside


class Lane:
    """What copies one way on one GPU go over; an event for each room says that its last copy has ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = cuda.Stream(device)
        self.events: dict[int, cuda.Event] = {}

    def start(self, target: torch.Tensor, source: torch.Tensor, room: torch.Tensor) -> None:
        self.stream.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        self.events.setdefault(room.data_ptr(), cuda.Event()).record(self.stream)

    def wait(self, room: torch.Tensor) -> None:
        cuda.current_stream(self.device).wait_event(self.events[room.data_ptr()])


LANES: dict[tuple[torch.device, str], Lane] = {}  # by GPU, and where to
IN_ORDER: set[str] = {"cpu"}  # kinds of devices whose copies are where they start


def _lane(device: torch.device, to: str) -> Lane | None:
    if device.type in IN_ORDER:
        return None
    if (device, to) not in LANES:
        LANES[device, to] = Lane(device)
    return LANES[device, to]


def store(room: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    lane = _lane(value.device, "host")
    if lane is None:
        return room.copy_(value, non_blocking=True)
    lane.start(room, value, room)
    return room


def stored(room: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if (lane := _lane(value.device, "host")) is not None:
        lane.wait(room)
    return room


def restore(room: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.empty_strided(room.size(), room.stride(), dtype=room.dtype, device=device)
    lane = _lane(value.device, "device")
    if lane is None:
        return value.copy_(room, non_blocking=True)
    lane.start(value, room, room)
    return value


def restored(value: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    if (lane := _lane(value.device, "device")) is not None:
        lane.wait(room)
    return value


def make_room(value: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Host memory for a value of this layout."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu", pin_memory=pinned)


def failure(device: torch.device) -> str:
    """How copies beside compute on this device differ from what they copy, in one line; empty where they do not.

    Three values go and come back while compute writes over the memory that they leave. Waits for the device.
    """
    try:
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(size, generator=generator) for size in SIZES]
        rooms = [make_room(value, pinned=device.type == "cuda") for value in given]
        busy = torch.randn(BUSY, BUSY, generator=generator).to(device)
        back = []
        for room, value in zip(rooms, [value.to(device) for value in given], strict=True):
            own = value + (busy @ busy)[0, 0] * 0  # written by compute that may not have begun
            store(room, own)
            busy = (busy @ busy).clamp(-1, 1)
            stored(room, own)
            own.fill_(7)
        for room in rooms:
            back.append(restore(room, device))
            busy = (busy @ busy).clamp(-1, 1)
        back = [restored(value, room).clone() for value, room in zip(back, rooms, strict=True)]
        wrong = [value.numel() for value, copy in zip(given, back, strict=True) if not torch.equal(value, copy.cpu())]
        return f"a value of {wrong[0]} elements came back as another" if wrong else ""
    except Exception as error:  # whatever a driver raises
        return f"{type(error).__name__}: {error}".splitlines()[0]


def finish() -> None:
    """Waits on the host until no copy is under way: where a program broke off, nothing else waits before the memory
    that one writes is another's."""
    for lane in LANES.values():
        with suppress(Exception):  # a device that fails copies nothing
            lane.stream.synchronize()


def use_order(device: torch.device) -> bool:
    """From now on copies on this kind of device are where they start; False if they were."""
    before = device.type in IN_ORDER
    IN_ORDER.add(device.type)
    return not before


def _define(name: str, function: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]) -> None:
    _LIBRARY.define(f"{name}{_SCHEMAS[name]}")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_compiled::{name}", shape, lib=_LIBRARY)


def _first(value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return value


def _shape(room: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(room.size(), room.stride(), dtype=room.dtype, device=device)


_define("store_", store, _first)
_define("stored", stored, _first)
_define("restore", restore, _shape)
_define("restored", restored, _first)

operators = torch.ops.fsdp_compiled
COPIES = tuple(getattr(operators, name).default for name in _SCHEMAS)
