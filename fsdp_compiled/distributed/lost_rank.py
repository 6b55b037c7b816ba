"""Why a call broke off, and which rank was lost: what this rank's error says, and the board has of the others.

Ranks that make the same call tell the board the same, and one that is killed in it says no last word. Gloo's error has
the address at the other end of the connection that broke, and each rank's addresses are on the board. Where an error
has none (NCCL), the ranks are asked for signs of life: a process that ended gives no other one.

Closing the connections between ranks, so that collectives that wait on them fail.

Gloo has no other way to end a collective that waits: `abort` returns and leaves it waiting (torch 2.11 and 2.13), and
a process group may only be destroyed by the thread that waits. But its connections are TCP sockets of this process, and
a shut down socket is what a dead peer looks like: an error, at once, at both ends.

Which sockets those are, both ends tell: a connection between two ranks has the same two addresses on both, the other
way round. Nothing else is touched; nor is the store, where the ranks read the reason. Nor do the sockets that are only
looked at change: where the script has set ``socket.setdefaulttimeout``, Python makes each socket that it is given
non-blocking, for all who hold it, unless it is told that it is already.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import torch.distributed as dist

from fsdp_compiled.distributed import watchdog
from fsdp_compiled.distributed.call_store import ABSENT, CLOSED, Board, StoreError, different, times

ADDRESS = re.compile(r"\[([^\[\]\s]+)\]:(\d+)")


def lost_ranks(board: Board, error: str) -> list[int]:
    """The ranks that are gone, as far as it can be found out; takes up to some seconds."""
    others = [rank for rank in range(board.world) if rank != board.rank]
    peers = {(host.removeprefix("::ffff:"), int(port)) for host, port in ADDRESS.findall(error)}
    found = []
    for rank in others if peers else []:
        ends = read(board.get(f"{rank}/connections") or "[]")
        if any((here.removeprefix("::ffff:"), port) in peers for here, port, _, _ in ends):
            found.append(rank)
    return found or _still(board, others)


def _still(board: Board, ranks: list[int]) -> list[int]:
    """Those who give no sign of life for longer than they should."""
    before = {rank: pulse for rank in ranks if (pulse := board.pulse(rank)) is not None}
    if before:
        time.sleep(1.5 * watchdog.BEAT + 1)
    return [rank for rank, pulse in before.items() if board.pulse(rank) == pulse]


DEVICE_ASSERT = "device-side assert"
LOST_DEVICE = (
    "Nothing was updated in that call or after it, but the GPU is lost to this process. Start all processes again from "
    "the last checkpoint."
)
TIMEOUT = "Timed out"
LOST = ("closed by peer", "reset by peer", "Broken pipe", TIMEOUT, "remote process has terminated")


def is_lost(error: str) -> bool:
    """Whether it says that another rank does not answer any more."""
    return any(text in error for text in LOST)


def why(board: Board, made: int, error: str) -> str | None:
    """Why a collective of this rank's last call, its ``made``-th, failed with this error, if another rank is why."""
    lost = is_lost(error)
    found = [_now(board, rank, made, lost, TIMEOUT in error) for rank in range(board.world)]
    if len(set(found)) > 1:
        return f"{different(found)}\n{CLOSED}"
    if lost and (gone := lost_ranks(board, error)):
        return _without(board, made, gone)
    return None


def _now(board: Board, rank: int, made: int, lost: bool, late: bool) -> str:
    """What that rank does, or that it is gone."""
    posted = board.read(rank, made)
    if posted.number == made:
        return posted.label
    if not lost or posted.number > made:  # it may be slow, or ahead: that made no call fail
        return board.read(board.rank, made).label
    if late and board.ended(rank) is None:
        return f"{ABSENT} after {times(board.newest(rank))}"
    return f"gone after {times(board.newest(rank))}"


def _without(board: Board, made: int, gone: Sequence[int]) -> str:
    """The sentence for ranks that ended in the same call."""
    names = ", ".join(board.name(rank) for rank in gone)
    verb = "is" if len(gone) == 1 else "are"
    where = (
        f"in or after its {nth(made)} call, {board.read(board.rank, made).label}" if made else "before its first call"
    )
    return f"{names} {verb} gone: the connection broke {where}, as rank {board.rank} sees it.\n{CLOSED}"


def parting_of(board: Board | None, made: int, error: BaseException | None) -> str | None:
    """Why a GPU broke off with this error, if ranks called with different programs or rates."""
    if board is None or not isinstance(error, RuntimeError) or DEVICE_ASSERT not in str(error):
        return None
    try:
        found = board.parting(made)
    except StoreError:
        return None
    return f"{found}\n{LOST_DEVICE}" if found is not None else None


def nth(count: int) -> str:
    return f"{count}{'th' if 10 < count % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(count % 10, 'th')}"


Ends = tuple[str, int, str, int]  # address and port, here and there
AS_IT_IS = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)  # the type of a socket that Python leaves alone


def store_port(store: dist.Store) -> int | None:
    """Where the store listens, if it does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def connections(but: int | None) -> set[Ends]:
    """The ends of this process's TCP connections, but for those of this port."""
    found = set()
    for connection, ends in _sockets():
        with closing(connection):
            if but not in (ends[1], ends[3]):
                found.add(ends)
    return found


def written(ends: set[Ends]) -> str:
    """As JSON, for `read`."""
    return json.dumps(sorted(ends))


def read(text: str) -> set[Ends]:
    """The ends that another rank has written."""
    return {tuple(ends) for ends in json.loads(text)}


def cut(theirs: set[Ends]) -> int:
    """Shuts down the connections to the rank that has these ends; says how many they were."""
    count = 0
    for connection, (here, port, there, other) in _sockets():
        with closing(connection):
            if (there, other, here, port) in theirs:
                with suppress(OSError):  # closed meanwhile
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _sockets() -> Iterator[tuple[socket.socket, Ends]]:
    """Each connected TCP socket, as another handle on it, to be closed, and its ends."""
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
