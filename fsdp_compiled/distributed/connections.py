"""Closes the connections between ranks, so that collectives that wait on them fail.

Gloo has no other way to end a collective that waits: `abort` returns and leaves it waiting (torch 2.11 and 2.13), and
a process group may only be destroyed by the thread that waits. But its connections are TCP sockets of this process, and
a shut down socket is what a dead peer looks like: an error, at once, at both ends.

Both ends can tell which sockets those are: a connection between two ranks has the same two addresses on both, the other
way round. Nothing else is touched, not even the store, where the ranks read the reason. Sockets that are only looked at
do not change either. If the script has set ``socket.setdefaulttimeout``, Python makes each socket that it is given
non-blocking, for all who hold it, unless it is told that the socket is so already.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import torch.distributed as dist

Ends = tuple[str, int, str, int]  # address and port, here and there
AS_IT_IS = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)  # the type of a socket that Python leaves alone


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


def written(ends: set[Ends]) -> str:
    """The ends as JSON, for `read`."""
    return json.dumps(sorted(ends))


def read(text: str) -> set[Ends]:
    """The ends that another rank has written."""
    return {tuple(ends) for ends in json.loads(text)}


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
