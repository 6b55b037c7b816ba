"""Why a call broke off: what this rank's error says, and the board has of the others, read afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_compiled.distributed.call_store import ABSENT, CLOSED, Board, StoreError, different, times
from fsdp_compiled.distributed.vanished import vanished

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
    if lost and (gone := vanished(board, error)):
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
