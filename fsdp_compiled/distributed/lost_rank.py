"""Finds why a call broke off, and which rank was lost, from this rank's error and the others' rows on the board.

Ranks that make the same call post the same on the board, and a rank that is killed in it says no last word. Gloo's
error has the address at the other end of the broken connection, and each rank's addresses are on the board. If an error
has no address (NCCL), the ranks are asked for signs of life: a process that ended gives no other one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence

from fsdp_compiled.distributed import watchdog
from fsdp_compiled.distributed.call_store import (
    ABSENT,
    CLOSED,
    COMMUNICATING,
    Board,
    Posted,
    Row,
    StoreError,
    different,
    times,
)

ADDRESS = re.compile(r"\[([^\[\]\s]+)\]:(\d+)")


def lost_ranks(board: Board, error: str) -> list[int]:
    """The ranks that are gone, as far as can be found out. Takes up to some seconds."""
    others = [rank for rank in range(board.world) if rank != board.rank]
    peers = {(host.removeprefix("::ffff:"), int(port)) for host, port in ADDRESS.findall(error)}
    found = []
    for rank in others if peers else []:
        ends = watchdog.ends_of(board, rank)
        if any((here.removeprefix("::ffff:"), port) in peers for here, port, _, _ in ends):
            found.append(rank)
    return found or _still(board, others)


def _still(board: Board, ranks: list[int]) -> list[int]:
    """The ranks that give no sign of life for longer than they should."""
    before = {rank: row for rank in ranks if (row := board.row(rank)) != Row()}
    if before:
        time.sleep(1.5 * watchdog.BEAT + 1)
    return [rank for rank, row in before.items() if board.row(rank) == row]


DEVICE_ASSERT = "device-side assert"
LOST_DEVICE = (
    "Nothing was updated in that call or after it, but the GPU is lost to this process. Start all processes again from "
    "the last checkpoint."
)
TIMEOUT = "Timed out"
LOST = ("closed by peer", "reset by peer", "Broken pipe", TIMEOUT, "remote process has terminated")


def is_lost(error: str) -> bool:
    """Whether the error says that another rank no longer answers."""
    return any(text in error for text in LOST)


def why(board: Board, made: int, error: str) -> str | None:
    """Why a collective of this rank's last call, its ``made``-th, failed with this error, if another rank caused it.

    The first rank that asks finds the reason for all ranks whose collectives failed alike. If it found none, later
    ranks look again, each for itself. With thousands of ranks, each looks only at its neighbours.
    """
    lost, looked = is_lost(error), False

    def look(ranks: Iterable[int] | None = None) -> str:
        nonlocal looked
        looked = True
        return _why(board, board.rows(made, ranks), made, error, lost) or ""

    kind = "late" if TIMEOUT in error else "lost" if lost else "failed"
    found = board.once(f"why/{made}/{kind}", look, 30.0)
    if not found and not looked:
        beside = {(board.rank + step) % board.world for step in (-1, 0, 1)}
        found = look(None if board.world <= board.KEPT else sorted(beside))
    return found or None


def _why(board: Board, rows: Mapping[int, Row], made: int, error: str, lost: bool) -> str | None:
    own = _said(rows[board.rank].call(made))
    # A rank that is slow, or far ahead, made no call fail.
    found = {rank: _said(row.call(made)) or own for rank, row in rows.items()}
    for rank, row in rows.items() if lost else ():
        if row.newest < made and row.ended is not None:
            found[rank] = f"gone after {times(row.ended)}"
        elif row.newest < made and TIMEOUT in error:
            found[rank] = f"{ABSENT} after {times(row.newest)}"
    if len(set(found.values())) > 1:
        return f"{different(found)}\n{CLOSED}"
    if lost and (gone := lost_ranks(board, error)):
        return _without(board, gone)
    return None


def _said(call: Posted | None) -> str:
    return call.label.partition(COMMUNICATING)[0] if call is not None else ""


def _without(board: Board, gone: Sequence[int]) -> str:
    """The sentence for ranks that ended without a word."""
    names = ", ".join(board.name(rank) for rank in gone)
    verb = "is" if len(gone) == 1 else "are"
    calls = board.row(gone[0]).calls
    where = f"in or after its {nth(calls[-1].number)} call, {_said(calls[-1])}" if calls else "before its first call"
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
