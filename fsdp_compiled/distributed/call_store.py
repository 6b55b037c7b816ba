"""The board: what each rank called, kept in the store, where all ranks read it without a collective.

    rank 0: 7|5c1d09aa|d2||step (float32[2, 4])        the number of its call, its wire, its rates, its label
    rank 1: 7|77e0b3f2|d2||forward (float32[2, 4])     the same number: so these two meet, and have different labels

The *label* says what a rank calls, with which shapes. The *wire* stands for the collectives that the call makes, in
order. It is `SILENT` for a call that makes none, and `MEETS` for one that meets the others first. Calls with different
labels are a mistake; calls with different wires wait for each other forever.

Each rank has one *row* on the board, with its last calls. A rank writes it at once if others wait for it; otherwise no
more often than the store can serve all ranks (`Board.interval`), so a rank may be further than its row says. The
watchdog's thread writes what is left within `LAG` seconds.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    "The store at which ranks meet does not answer: torchrun's agent that holds it, or, without torchrun, rank 0, has "
    "ended or hangs, or its machine or the network to it is lost"
)


class StoreError(RankError):
    """The store is gone, and with it every way for ranks to tell each other anything."""


class Posted(NamedTuple):
    """One call of a rank. ``missed``: of a backward; stands for the parameters that it leaves without a gradient."""

    number: int
    wire: str
    label: str
    hypers: str = ""
    missed: str = ""

    @property
    def communicates(self) -> bool:
        """Whether it goes on into collectives, and waits in them for the others."""
        return self.wire not in (MEETS, SILENT)


class Row(NamedTuple):
    """What a rank has on the board. ``ended``: how many calls it had made when its process ended."""

    calls: tuple[Posted, ...] = ()
    ended: int | None = None
    beats: int = 0

    @property
    def newest(self) -> int:
        """How many calls the rank has made, as far as it has written them."""
        return self.calls[-1].number if self.calls else 0

    def call(self, number: int) -> Posted | None:
        """This call; None if it is not there yet, or was dropped because it is so old."""
        return next((call for call in reversed(self.calls) if call.number == number), None)

    def is_behind(self, number: int) -> bool:
        """Whether this call may come yet."""
        return self.newest < number and self.ended is None

    def written(self) -> str:
        """As JSON, each label once, for `read`."""
        labels = list(dict.fromkeys(call.label for call in self.calls))
        place = {label: index for index, label in enumerate(labels)}
        calls = [(call.number, call.wire, place[call.label], call.hypers, call.missed) for call in self.calls]
        return json.dumps((self.ended, self.beats, labels, calls), separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Row:
        ended, beats, labels, calls = json.loads(text)
        return cls(tuple(Posted(number, wire, labels[at], *more) for number, wire, at, *more in calls), ended, beats)


class Board:
    """This rank's view of it. Threads may write to it."""

    KEPT = 64  # calls that a rank may run ahead of another before its posts are dropped
    RATE = 16384  # rows a second that the store is asked to take of all ranks together
    LAG = 1.5  # seconds after which the watchdog's thread has written what a rank has posted

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.interval = max(0.01, world / self.RATE)  # seconds between two writes of a row that nobody waits for
        self._calls: deque[Posted] = deque(maxlen=self.KEPT)
        self._ended: int | None = None
        self._beats = 0
        self._written = -math.inf  # when the row was last written
        self._pending = False
        self._lock = threading.RLock()  # a signal's handler may interrupt on the same thread
        self._process = os.getpid()
        self._there: set[int] = set()  # ranks whose rows are there
        self._asked: dict[object, None] = {}  # requests that the store has not answered yet, the oldest first

    def post(self, call: Posted) -> None:
        """Posts what this rank does now; under the last call's number again, if that call became something else."""
        with self._lock:
            if self._calls and self._calls[-1].number == call.number:
                self._calls.pop()
            self._calls.append(call)
            self._pending = True
            if call.wire == MEETS or call.missed or time.monotonic() - self._written >= self.interval:
                self._write()

    def beat(self, seconds: float) -> None:
        """Writes what was left. Gives at least a sign of life if the row was not written for so many seconds."""
        with self._lock:
            since = time.monotonic() - self._written
            if since >= seconds or (self._pending and since >= self.interval):
                self._beats += 1
                self._write()

    def end(self, made: int) -> None:
        """Says that this process ends, and after how many calls. A process that this one forked says nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._ended = made
            self._write()

    def _write(self) -> None:
        self.set(f"{self.rank}/calls", self._own.written())
        self._written, self._pending = time.monotonic(), False

    @property
    def _own(self) -> Row:
        return Row(tuple(self._calls), self._ended, self._beats)

    def row(self, rank: int) -> Row:
        """This rank's row as it stands there now."""
        if rank == self.rank:
            with self._lock:
                return self._own
        key = f"{rank}/calls"
        if rank not in self._there and self.get(key) is None:
            return Row()
        self._there.add(rank)
        with self._asking():
            return Row.read(self.store.get(key).decode())

    def rows(self, number: int, ranks: Iterable[int] | None = None) -> dict[int, Row]:
        """The rows of all ranks, or of these ranks. Rows that lack this call are read again after `LAG`."""
        found = {rank: self.row(rank) for rank in (range(self.world) if ranks is None else ranks)}
        if behind := [rank for rank, row in found.items() if row.is_behind(number)]:
            time.sleep(self.LAG)
            found.update((rank, self.row(rank)) for rank in behind)
        return found

    def parting(self, made: int) -> str | None:
        """The first of the last calls in which ranks had different programs or rates; None if there is none."""
        rows = self.rows(made, None if self.world <= self.KEPT else {0, self.rank, (self.rank + 1) % self.world})
        for number in range(max(1, made - self.KEPT + 1), made + 1):
            posted = {rank: call for rank, row in sorted(rows.items()) if (call := row.call(number)) is not None}
            known = {call[1:4] for call in posted.values()}  # all but ``missed``, which `Calls.reached` reports
            if len(posted) < len(rows) or len(known) == 1:
                continue
            hypers = len({call.hypers for call in posted.values()}) > 1
            lines = (
                f"  rank {rank}: {call.label}{f', rates {call.hypers[:8]}' if hypers else ''}"
                for rank, call in posted.items()
            )
            return "\n".join([f"The ranks called with different batches or rates in call {number}:", *lines, CURE])
        return None

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
        """Leaves the reason there for the others."""
        self.set("error", message)

    def tell(self, number: int, message: str) -> None:
        """Leaves word that this call failed on this rank, which still takes its part in the others' collectives."""
        self.set(f"failed/{number % self.KEPT}", f"{number}|{message}")

    def told(self, number: int) -> str | None:
        """Why this call failed on another rank, once that rank has told it."""
        found, _, message = (self.get(f"failed/{number % self.KEPT}") or "0|").partition("|")
        return message if int(found) == number else None

    @property
    def unanswered(self) -> object | None:
        """Stands for the oldest request, by any thread, that the store has not answered yet."""
        return next(iter(list(self._asked)), None)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turns the error of a store that is gone into a `StoreError`."""
        self._asked[mark := object()] = None
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise StoreError(f"{NO_STORE} ({str(error).splitlines()[0]}).\n{CLOSED}") from error
        finally:
            del self._asked[mark]

    def get(self, key: str) -> str | None:
        """What the key holds now; waits for nobody."""
        with self._asking():
            return self.store.get(key).decode() if self.store.check([key]) else None

    def set(self, key: str, text: str) -> None:
        with self._asking():
            self.store.set(key, text)

    def add(self, key: str, count: int = 1) -> int:
        """The sum of what ranks have added at the key, this addition included."""
        with self._asking():
            return self.store.add(key, count)

    def forget(self, key: str) -> None:
        """Deletes the key."""
        with self._asking(), suppress(NotImplementedError):  # a store that only grows
            self.store.delete_key(key)

    def once(self, key: str, work: Callable[[], str], limit: float) -> str:
        """What the first rank that asks finds, for all that ask. So one rank reads what all have written, not each.

        A rank that has waited for ``limit`` seconds finds it itself.
        """
        if self.add(f"{key}/asked") > 1:
            until = time.monotonic() + limit
            while time.monotonic() < until:
                if (found := self.get(key)) is not None:
                    return found
                time.sleep(max(0.01, self.interval))
        found = work()
        self.set(key, found)
        return found


def times(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def different(said: Mapping[int, str], world: int = 0) -> str:
    """The sentence for ranks that make different calls. ``said``: labels by rank, of ``world`` ranks or these alone."""
    labels = list(said.values())
    shown, world = list(said), world or len(said)
    if world > 8:
        shown = [shown[0], next((rank for rank in shown if said[rank] != labels[0]), shown[-1])]
    lines = [f"  rank {rank}: {said[rank]}" for rank in shown]
    if world > len(shown):
        lines.append(f"  ... and {world - len(shown)} more ranks")
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
