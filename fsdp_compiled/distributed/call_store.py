"""The board: what each rank called, kept in the store, where all ranks read it without a collective.

    rank 0: 7|5c1d09aa|d2||step (float32[2, 4])        the number of its call, its wire, its rates, its label
    rank 1: 7|77e0b3f2|d2||forward (float32[2, 4])     the same number: so these two meet, and have different labels

The *label* says what a rank calls with which shapes. The *wire* stands for the collectives that the call makes, in
order; it is `SILENT` for a call that makes none, and `MEETS` for one that first meets the others. Calls with other
labels are a mistake; calls with other wires wait for each other forever.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist

from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.ir.program import SILENT

MEETS = ""  # in the place of a wire
REFUSED = "refused: "
ABSENT = "still absent"
UNDECIDED = "undecided: "
COMMUNICATING = ", communicating "
WRITES = ", after writes to parameters that sum up to "
CURE = (
    "Give every rank a batch of the same shapes and dtypes in every call (drop or pad the last one), and the same "
    "learning rate."
)
ARGUMENTS = "Give every rank the same folder, step and options, and extra objects of the same names."
ALIKE = (
    "Lengths of batches may differ between ranks, but not which modules are called, in which order, and which are "
    "trained."
)
WROTE = (
    "Write to parameters on every rank alike (clamps, averages, copies), never `if rank == 0` alone; the same write on "
    "ranks that lack it is enough to go on."
)
CHECKPOINT = ("save to ", "load from ")
SAME = "Make the same calls in the same order on every rank, those that only evaluate too."
JOIN = (
    "Give every rank as many batches (DistributedSampler pads); or, with compile_sharded, train inside "
    "`with sharded.join():`, where a rank that has run out goes on with weight zero."
)
HANGS = (
    "It hangs, or does something between its calls that takes longer than the process group's timeout: look where it "
    "is (py-spy dump --pid), or give more time: dist.init_process_group(..., timeout=...)."
)
CLOSED = (
    "No rank goes on: the process group was ended (dist.destroy_process_group, whoever started it), and no more calls "
    "are taken. Start all processes again from the last checkpoint; torchrun --max-restarts does it."
)
NO_STORE = (
    "The store at which ranks meet is gone: torchrun's agent that holds it has ended, or, without torchrun, rank 0 has"
)


class StoreError(RankError):
    """The store is gone, and with it every way for ranks to tell each other anything."""


@contextmanager
def asking() -> Iterator[None]:
    """What a store that is gone raises is a `StoreError`."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise StoreError(f"{NO_STORE} ({str(error).splitlines()[0]}).\n{CLOSED}") from error


class Posted(NamedTuple):
    """One call of a rank. ``missed``: of a backward, stands for the parameters that it leaves without a gradient."""

    number: int
    wire: str
    label: str
    hypers: str = ""
    missed: str = ""

    @property
    def communicates(self) -> bool:
        """Whether it goes on into collectives, and waits in them for the others."""
        return self.wire not in (MEETS, SILENT)


class Board:
    """This rank's view of it."""

    SLOTS = 64  # calls that a rank may run ahead of another before its posts are overwritten

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world

    def post(self, call: Posted) -> None:
        said = (str(call.number), call.wire, call.hypers, call.missed, call.label)
        self.set(f"{self.rank}/{call.number % self.SLOTS}", "|".join(said))

    def read(self, rank: int, number: int) -> Posted:
        """What stands in this call's slot; its number may be another, and is 0 where nothing stands there."""
        text = self.get(f"{rank}/{number % self.SLOTS}")
        if text is None:
            return Posted(0, MEETS, "")
        found, wire, hypers, missed, label = text.split("|", 4)
        return Posted(int(found), wire, label, hypers, missed)

    def parting(self, made: int) -> str | None:
        """The first of the last calls in which ranks called other programs, or with other rates; None if none did."""
        ranks = range(self.world) if self.world <= self.SLOTS else sorted({0, self.rank, (self.rank + 1) % self.world})
        for number in range(max(1, made - self.SLOTS + 1), made + 1):
            posted = [self.read(rank, number) for rank in ranks]
            known = {call[1:4] for call in posted}  # but for what they missed, of which `Calls.reached` tells
            if any(call.number != number for call in posted) or len(known) == 1:
                continue
            hypers = len({call.hypers for call in posted}) > 1
            calls = [f"{call.label}{f', rates {call.hypers[:8]}' if hypers else ''}" for call in posted]
            lines = (f"  rank {rank}: {call}" for rank, call in zip(ranks, calls, strict=True))
            return "\n".join([f"The ranks called with different batches or rates in call {number}:", *lines, CURE])
        return None

    def newest(self, rank: int) -> int:
        """How many calls the rank has made."""
        return max(self.read(rank, slot).number for slot in range(self.SLOTS))

    def ended(self, rank: int) -> int | None:
        """How many calls the rank had made when its process ended; None while it runs."""
        text = self.get(f"{rank}/ended")
        return None if text is None else int(text)

    def end(self, made: int) -> None:
        """Says that this process ends, and after how many calls."""
        self.set(f"{self.rank}/ended", str(made))

    def beat(self, count: int) -> None:
        """A sign of life; another count each time."""
        self.set(f"{self.rank}/alive", str(count))

    def pulse(self, rank: int) -> str | None:
        """The rank's last sign of life."""
        return self.get(f"{rank}/alive")

    def introduce(self) -> None:
        """Says where this rank runs, for messages."""
        self.set(f"{self.rank}/place", f"process {os.getpid()} on {socket.gethostname()}")

    def name(self, rank: int) -> str:
        """``Rank 3 (process 812 on node-1)``"""
        place = self.get(f"{rank}/place")
        return f"Rank {rank} ({place})" if place else f"Rank {rank}"

    def error(self) -> str | None:
        """Why ranks are leaving, once one knows it."""
        return self.get("error")

    def fail(self, message: str) -> None:
        """Leaves it there for the others."""
        self.set("error", message)

    def tell(self, number: int, message: str) -> None:
        """Leaves there that this call failed on this rank, which still takes its part in the others' collectives."""
        self.set(f"failed/{number % self.SLOTS}", f"{number}|{message}")

    def told(self, number: int) -> str | None:
        """Why this call failed on another rank, once that rank has told it."""
        found, _, message = (self.get(f"failed/{number % self.SLOTS}") or "0|").partition("|")
        return message if int(found) == number else None

    def get(self, key: str) -> str | None:
        """What stands there now; waits for nobody."""
        with asking():
            return self.store.get(key).decode() if self.store.check([key]) else None

    def set(self, key: str, text: str) -> None:
        with asking():
            self.store.set(key, text)

    def forget(self, key: str) -> None:
        """Nothing stands there any more."""
        with suppress(NotImplementedError):  # a store that only grows
            self.store.delete_key(key)


def times(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def different(labels: Sequence[str]) -> str:
    """The sentence for ranks that make different calls."""
    lines = [f"  rank {rank}: {label}" for rank, label in enumerate(labels)]
    if len(lines) > 8:
        odd = next(index for index, label in enumerate(labels) if label != labels[0])
        lines = [lines[0], lines[odd], f"  ... and {len(lines) - 2} more ranks"]
    if any(label.startswith(REFUSED) for label in labels):
        return "\n".join(["A rank refused its call, so nothing was updated:", *lines])
    if any(label.startswith("gone") for label in labels):
        return "\n".join(["A rank is gone, so nothing was updated:", *lines, JOIN])
    if any(label.startswith(ABSENT) for label in labels):
        return "\n".join(["A rank did not come in time, so nothing was updated:", *lines, HANGS])
    if any(WRITES in label for label in labels) and len({label.partition(WRITES)[0] for label in labels}) == 1:
        return "\n".join(["The ranks wrote to parameters otherwise, so nothing was done:", *lines, WROTE])
    if all(label.startswith(CHECKPOINT) for label in labels) and len({label[:4] for label in labels}) == 1:
        return "\n".join(["The ranks called with different arguments, so nothing was done:", *lines, ARGUMENTS])
    if len({label.split(" ")[0] for label in labels}) > 1:
        return "\n".join(["The ranks made different calls, so nothing was updated:", *lines, SAME])
    if any(COMMUNICATING in label for label in labels):
        return "\n".join(["The ranks' programs communicate otherwise, so nothing was updated:", *lines, ALIKE])
    return "\n".join(["The ranks called with different batches or rates, so nothing was updated:", *lines, CURE])
