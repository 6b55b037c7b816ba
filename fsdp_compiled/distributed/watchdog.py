"""The watchdog: if this rank's call does not return, it looks up what the other ranks called.

    rank 0: call 7, step      gather  gather  reduce-scatter ...      waits, and would until the process group's timeout
    rank 1: call 7, forward   gather  gather                          is done, and does something else

Nobody fails here: both calls were compiled before, so neither rank met the other. But both are on the board. A thread
sleeps beside the rank, and looks there once a call has lasted longer than `PATIENCE`. It has three reasons to act:

- another rank posted the same call with another wire: their collectives can never pair up;
- the next rank gives no sign of life any more (each rank's thread gives one every `BEAT` seconds): its process hangs
  as a whole or was stopped, or its machine is lost;
- the connections to the next rank are closed: its process has ended, while this rank waits for it elsewhere.

Each rank watches the next one, so every rank is watched. A rank that is late or slow gives signs of life, and is waited
for until the process group's timeout.

The thread leaves the reason on the board and closes the connections to the other ranks. What waits for these then fails
on all ranks, as if a rank had died, and each rank raises the reason as its error. If that does not end the call (NCCL's
kernels wait on the device), the thread does what NCCL's watchdog does: it says why, and ends the process. NCCL's own
does not: it knows nothing of the collectives that a CUDA graph replays.

The store itself may be gone, with rank 0 or with torchrun's agent. Then no rank can tell another anything, and no call
can begin. A call that does not end within `GRACE` waits for what will not come, so the process ends there, too. If the
store's process hangs, or a cable was pulled, the store is not gone. It only never answers, and whoever asks it waits. A
second thread, which asks nothing, closes the connection after `SILENCE`. A call that was given to a GPU is over when
the GPU has done it.

**Connections.** Gloo has no other way to end a collective that waits: `abort` returns and leaves it waiting (torch 2.11
and 2.13), and a process group may only be destroyed by the thread that waits. But its connections are TCP sockets of
this process, and a shut down socket is what a dead peer looks like: an error, at once, at both ends.

Both ends can tell which sockets those are: a connection between two ranks has the same two addresses on both, the other
way round. Nothing else is touched, not even the store, where the ranks read the reason. Sockets that are only looked at
do not change either. If the script has set ``socket.setdefaulttimeout``, Python makes each socket that it is given
non-blocking, for all who hold it, unless it is told that the socket is so already.
"""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from fsdp_compiled.distributed.call_store import CLOSED, MEETS, Board, Posted, Row, StoreError, different

BEAT = 2.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without one after which a rank is given up
PATIENCE = 10.0  # seconds that a call lasts before anybody wonders
HEARING = 2.0  # seconds after which a rank asks whether another one has left
GRACE = 5.0  # seconds for an error to come out of a call whose connections are closed
Ends = tuple[str, int, str, int]  # address and port, here and there
AS_IT_IS = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)  # the type of a socket that Python leaves alone


@dataclass(eq=False)
class Running:
    """The call that this rank is in."""

    call: Posted
    since: float = field(default_factory=time.monotonic)
    looked: int = 0  # how many ranks were looked at
    agree: set[int] = field(default_factory=set)  # ranks that made the same call
    done: Callable[[], bool] | None = None  # whether the device is done, once the call has returned on the host

    @property
    def lasts(self) -> float:
        return time.monotonic() - self.since


class Watchdog:
    """The thread of one rank; sleeps until a call lasts too long."""

    def __init__(self, board: Board, cuts: bool) -> None:
        self._board, self._cuts = board, cuts
        self._running: Running | None = None
        self._pulse: tuple[Row | None, float] = None, time.monotonic()  # the next rank's row, and since when
        self._told: set[Ends] = set()  # this rank's connections, as the others know them
        self._ever: set[Ends] = set()  # all connections that it has had
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, call: Posted) -> None:
        """This rank's call starts."""
        self._running = Running(call)
        self.start()

    def start(self) -> None:
        """From now on this rank gives signs of life."""
        if self._thread is None:
            if self._cuts:  # now, while they are there: a rank can end before its first sign of life
                with suppress(StoreError):
                    self._tell_connections()
            self._thread = threading.Thread(target=self._run, name="fsdp_compiled watchdog", daemon=True)
            self._thread.start()
            if (port := store_port(self._board.store)) is not None:
                threading.Thread(
                    target=self._watch_store, args=(port,), name="fsdp_compiled store", daemon=True
                ).start()

    def end(self, on_device: Callable[[], Callable[[], bool]] | None = None) -> None:
        """Notes that the call is over. If its collectives may still run on a device, ``on_device`` gives a function
        that says when they have ended."""
        if self._running is not None and on_device is not None and self._running.call.communicates:
            self._running.done = on_device()
        else:
            self._running = None

    @property
    def _underway(self) -> Running | None:
        """The current call, until its end on the device."""
        running = self._running
        if running is not None and running.done is not None:
            with suppress(RuntimeError):  # the GPU is lost, as its next use will say
                return None if running.done() else running
            return None
        return running

    def stop(self) -> None:
        self._stop.set()

    def wait_until_stopped(self) -> None:
        """Waits before Python ends: a thread that comes back from the store after that would crash it."""
        if self._thread is not None:
            self._thread.join(5.0)

    def cut(self) -> None:
        """Closes this rank's connections to the others, as far as both ends are known by now."""
        if self._cuts:
            self._tell_connections()
            for rank in range(self._board.world):
                if rank != self._board.rank:
                    cut(ends_of(self._board, rank))

    def _tell_connections(self) -> None:
        now = connections(store_port(self._board.store))
        if now != self._told:  # groups were made since
            self._told = now
            self._ever |= now
            self._board.set(f"{self._board.rank}/connections", json.dumps(sorted(now)))

    def _run(self) -> None:
        try:
            self._watch()
        except StoreError as error:
            self._watch_without_store(str(error))

    def _watch(self) -> None:
        board, last, looked = self._board, -math.inf, -math.inf
        board.introduce()
        while True:
            now = time.monotonic()
            board.beat(BEAT)
            if now - last >= BEAT:
                if self._cuts:
                    self._tell_connections()
                if now - last > 2 * BEAT + 1:  # this process itself was stopped: others may have been, too
                    self._pulse = (None, now)
                last = now
            if self._stop.wait(min(1.0, PATIENCE / 4)):
                return
            running = self._underway
            if running is None or running.lasts < min(HEARING, PATIENCE):
                self._pulse = (None, time.monotonic())
                continue
            if (now := time.monotonic()) - looked < 4 * board.interval:  # of thousands, each asks the store less often
                continue
            looked = now
            reason = board.error() or self._silent(running) or self._gone(running)
            if reason is None and running.call.communicates and running.lasts >= PATIENCE:
                reason = self._reason(running)
            if reason is not None:
                self._break(running, reason)

    def _watch_store(self, port: int) -> None:
        oldest, lasts, tick = None, 0.0, min(1.0, SILENCE / 4)
        while not self._stop.wait(tick):
            before, oldest = oldest, self._board.unanswered
            lasts = lasts + tick if oldest is not None and oldest is before else 0.0
            if lasts >= SILENCE:
                cut_from_store(port)

    def _watch_without_store(self, reason: str) -> None:
        since = time.monotonic()
        while not self._stop.wait(min(1.0, GRACE / 4)):
            running = self._underway
            if running is not None and time.monotonic() - max(since, running.since) > GRACE:
                self._end_process(reason)

    @property
    def _next(self) -> int:
        return (self._board.rank + 1) % self._board.world

    def _has_come(self, running: Running) -> bool:
        """Whether the next rank made this call too, and ended after it."""
        ended = self._board.row(self._next).ended
        return ended is not None and ended >= running.call.number

    def _silent(self, running: Running) -> str | None:
        """A message that the next rank no longer gives a sign of life, if so."""
        board, now = self._board, time.monotonic()
        pulse, since = board.row(self._next), self._pulse[1]
        if pulse != self._pulse[0] or since > now - SILENCE:
            self._pulse = (pulse, since if pulse == self._pulse[0] else now)
            return None
        if self._has_come(running):
            return None
        return self._lost(
            f"{board.name(self._next)} has given no sign of life for {SILENCE:.0f} s: it hangs or was "
            "stopped, or its machine is lost"
        )

    def _gone(self, running: Running) -> str | None:
        """A message that the next rank's process has ended without a word, if its connections say so."""
        if not self._cuts:
            return None
        self._tell_connections()
        theirs = ends_of(self._board, self._next)
        common = {(there, other, here, port) for here, port, there, other in theirs} & self._ever
        if not common or common & self._told or self._has_come(running):
            return None
        return self._lost(f"{self._board.name(self._next)} is gone: its connections are closed")

    def _lost(self, what: str) -> str:
        """Leaves the reason on the board, unless one is there: a rank says why before it cuts connections."""
        running, board = self._running, self._board
        if (known := board.error()) is not None:
            return known
        call = f", while rank {board.rank} waits in {running.call.label}" if running is not None else ""
        message = f"{what}{call}.\n{CLOSED}"
        board.fail(message)
        return message

    def _reason(self, running: Running) -> str | None:
        """Why this call will never return, if another rank's calls show it.

        It asks one rank at a time, the next one first: where any two ranks differ, two neighbours differ, and thousands
        of ranks that wait for a late one ask the store little.
        """
        board, call = self._board, running.call
        if len(running.agree) == board.world - 1:
            return None
        rank = (board.rank + 1 + running.looked % (board.world - 1)) % board.world
        running.looked += 1
        other = board.row(rank).call(call.number)
        if other is None or other.wire == MEETS:
            return None
        if other.wire == call.wire:
            running.agree.add(rank)
            return None
        posted = {rank: board.row(rank).call(call.number) for rank in range(board.world)}
        message = different({rank: one.label if one else "is not there yet" for rank, one in posted.items()})
        message = f"{message}\n{CLOSED}"
        board.fail(message)
        return message

    def _break(self, running: Running, reason: str) -> None:
        """Makes the call fail, or else ends the process."""
        board, until, offset = self._board, time.monotonic() + GRACE, 0
        while time.monotonic() < until:
            if self._cuts:
                offset = offset % (board.world - 1) + 1
                cut(ends_of(board, (board.rank + offset) % board.world))
            if self._stop.wait(0.02) or self._underway is not running:
                return
        board.end(running.call.number)
        self._end_process(reason)

    def _end_process(self, reason: str) -> None:
        place = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(place)) if place is not None else ""
        print(f"Rank {self._board.rank} waits here:\n{stack}RankError: {reason}", file=sys.stderr, flush=True)
        os._exit(1)


def store_port(store: dist.Store) -> int | None:
    """Where the store listens, if it does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def connections(but: int | None) -> set[Ends]:
    """The ends of this process's TCP connections, without those of this port."""
    found = set()
    for connection, ends in _sockets():
        with closing(connection):
            if but not in (ends[1], ends[3]):
                found.add(ends)
    return found


def ends_of(board: Board, rank: int) -> set[Ends]:
    """The ends that this rank has written on the board."""
    return {tuple(ends) for ends in json.loads(board.get(f"{rank}/connections") or "[]")}


def cut(theirs: set[Ends]) -> int:
    """Shuts down the connections to the rank that has these ends; returns how many there were."""
    return _shut_down(lambda here, port, there, other: (there, other, here, port) in theirs)


def cut_from_store(listens: int) -> int:
    """Shuts down this process's connections to the store that listens at this port."""
    return _shut_down(lambda here, port, there, other: other == listens)


def _shut_down(which: Callable[[str, int, str, int], bool]) -> int:
    count = 0
    for connection, ends in _sockets():
        with closing(connection):
            if which(*ends):
                with suppress(OSError):  # closed meanwhile
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _sockets() -> Iterator[tuple[socket.socket, Ends]]:
    """Each connected TCP socket, as another handle on it that has to be closed, and its ends."""
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        with suppress(OSError):  # not connected, or closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(-1, AS_IT_IS, fileno=os.dup(int(name)))
            try:
                here, there = connection.getsockname(), connection.getpeername()
                kind = connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
            except OSError:
                connection.close()
                continue
            if connection.family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM:
                yield connection, (here[0], here[1], there[0], there[1])
            else:
                connection.close()
