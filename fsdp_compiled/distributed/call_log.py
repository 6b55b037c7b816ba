"""Each rank says what it is about to do before it does it.

A collective that one rank never joins would keep the others waiting. So before every call a rank posts the call on the
board, and waits for no answer. A rank that is about to do something rare (compile, refuse a batch, collect the whole
model) meets the others first (`meeting`). A rank whose collective failed reads the board afterwards, to say which rank
did something else. For a rank whose collective does not return, a thread reads the board (`watchdog`).
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import sys
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from fsdp_compiled.distributed.call_store import (
    CLOSED,
    COMMUNICATING,
    MEETS,
    REFUSED,
    UNDECIDED,
    Board,
    Posted,
    StoreError,
)
from fsdp_compiled.distributed.lost_rank import is_lost, nth, parting_of, why
from fsdp_compiled.distributed.meeting import Broken, Meeting, Verdict
from fsdp_compiled.distributed.mesh import ENDED, Mesh, RankError, from_first
from fsdp_compiled.distributed.process_group import backends, close, timeout
from fsdp_compiled.distributed.watchdog import Watchdog
from fsdp_compiled.ir.program import SILENT

log = logging.getLogger("fsdp_compiled")


class Calls:
    """This rank's place on the board."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._made = [0]  # shared with the code that runs when Python exits
        # Goes through the collectives of a call that the others are in; False where it cannot. The second argument:
        # whether they may hear nothing of it.
        self.take_part: Callable[[], Callable[[Posted, bool], bool] | None] = lambda: None  # a weak reference
        self.hypers = ""  # a digest of the hyperparameters that the next call uses
        self.closed: str | None = None  # why no call can be made any more
        self._last: deque[str] = deque(maxlen=12)  # the wires of the last calls that communicated
        self._next: dict[tuple[str, ...], str] = {}  # by such a row, and by its end alone: the wire that came next
        self._waits = mesh.device.type == "cpu"  # whether a call returns only when its collectives are done
        self._group = weakref.ref(dist.group.WORLD) if mesh.world > 1 else None
        self.board: Board | None = None
        self.watchdog: Watchdog | None = None
        self._met: Meeting | None = None  # this rank's last one
        if mesh.world > 1:
            store = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"fsdp_compiled/{from_first(uuid.uuid4().hex, mesh)}", store)
            self.board = Board(store, mesh.rank, mesh.world)
            self.watchdog = Watchdog(self.board, cuts=set(backends(mesh).values()) == {"gloo"})
            self.watchdog.start()
            weakref.finalize(self, self.watchdog.stop)
            atexit.register(_finish, self.board, self._made, self.watchdog)

    @property
    def count(self) -> int:
        """How many calls this rank has made."""
        return self._made[0]

    def check_open(self) -> None:
        """Raises `RankError` where an earlier call, or the end of the process group, left nothing to go on with."""
        if self.closed is not None:
            raise RankError(f"An earlier call failed for good:\n{self.closed}")
        if self._group is not None and (dist.group.WORLD is None or self._group() is not dist.group.WORLD):
            raise RankError(ENDED)

    def reopen(self) -> None:
        """Lets calls be made again, if only this process's state was in doubt, and no longer is."""
        if self.mesh.world == 1:
            self.closed = None

    def post(self, label: str, wire: str = MEETS, missed: Sequence[str] = ()) -> None:
        """Posts this rank's next call, which goes on with this wire, or meets others first. ``missed``: see
        `reached`."""
        self.check_open()
        self._made[0] += 1
        self._put(Posted(self.count, wire, label, self.hypers, _digest(missed)))

    def reached(self, missed: Sequence[str]) -> None:
        """Raises `RankError` on all ranks if a backward left these parameters without a gradient here, and other
        parameters on another rank; called after the backward ran.

        A rank asks the next rank, and only if it missed something itself: wherever two ranks differ, somebody asks.
        """
        if self.board is None or not missed:
            return
        other = (self.mesh.rank + 1) % self.mesh.world
        with self._leaving():
            posted = Meeting(self.board, Posted(self.count, MEETS, ""), timeout(self.mesh)).wait_for(other)
        if posted.number == self.count and posted.missed != _digest(missed):
            more = f" (and {len(missed) - 1} more)" if len(missed) > 1 else ""
            message = (
                f"Its batch reached no {missed[0]}{more}, and that of rank {other} reached other parameters: some "
                "ranks would update what others do not. Call model.set_reduce_scatter_unused_params(True): then what a "
                "rank does not reach has a gradient of zeros there, and of the mean everywhere; or use all parameters "
                "in each batch, times zero."
            )
            self.abandon(message)
            assert self.closed is not None
            raise RankError(self.closed)

    def _foreseen(self) -> str | None:
        """The wire that came next after the same last calls; or, if there were none, after the same last call."""
        return self._next.get(tuple(self._last)) or self._next.get(tuple(self._last)[-1:])

    def _put(self, call: Posted) -> None:
        """Puts the call on the board, as what this rank does now."""
        if call.communicates:
            if len(self._next) > 1024:
                self._next.clear()
            self._next[tuple(self._last)] = self._next[tuple(self._last)[-1:]] = call.wire
            self._last.append(call.wire)
        if self.board is not None:
            try:
                self.board.post(call)
            except StoreError as error:
                self.leave(str(error))
                raise
            if self.watchdog is not None:
                self.watchdog.begin(call)

    def returned(self) -> None:
        """Notes that the call is over. A GPU may still work on it, and is watched until the next call."""
        if self.watchdog is not None:
            self.watchdog.end(None if self._waits else self._device_is_done)

    def _device_is_done(self) -> Callable[[], bool]:
        """Returns a function that says whether the GPU has done what it was given until now."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.mesh.device).record_event()
        return event.query

    def meet(self, label: str, part: Callable[[str], str] | None = None) -> bool:
        """Returns when every rank has posted this call with this label; raises `RankError` where one has another.

        ``part``: gives the part of a label that must be the same, for calls that all ranks meet in; then the method
        returns whether the whole labels are the same.
        """
        if self.board is None:
            return True
        found = self._verdict(_label, _label if part is None else lambda call: f"{call.wire}|{part(call.label)}")
        if found.alike or (part is not None and found.near):
            return found.alike
        message = found.difference(self.mesh.world)
        take_part = self.take_part()
        # A rank that goes on waits in its collectives, for this rank too. One that sends nothing does so in none; but
        # where nobody takes part for others, in a loop, what belongs to it, a backward, waits later.
        on = {one for rank, one in found.posted.items() if one.wire != MEETS and rank != self.mesh.rank}
        waiting = {one for one in on if one.communicates or take_part is None}
        if waiting:
            self.board.tell(self.count, message)
            if len(waiting) > 1 or not (take_part and take_part(waiting.pop(), label.startswith(REFUSED))):
                message = f"{message}\n{CLOSED}"
                self.board.fail(message)
                self.leave(message)
        raise RankError(message)

    def undecided(self, label: str, wire: str) -> bool:
        """Posts this rank's next call with this wire if all ranks would make it so; returns whether they do.

        If not, this rank makes the call another way: `enter`, with ``posted``.
        """
        if self.board is None:
            self.post(label, wire)
            return True
        self.post(UNDECIDED + label)
        if not self._verdict(_label, _label, decided=False).alike:
            return False
        self._put(Posted(self.count, wire, label, self.hypers))
        return True

    def begin(self, label: str, wire: str, missed: Sequence[str] = ()) -> None:
        """Posts this rank's next call in a loop, with a program that it knows. ``missed``: see `reached`.

        Collectives that do not pair up must not begin: gloo ends a process that is sent more than it waits for. Ranks
        that made the same calls until now foresee the same next call. So if two differ, one of them looks before it
        goes on. If forward sends nothing, one rank alone may evaluate; then its count of calls is not that of the
        others.
        """
        if self.mesh.shard == 1 or wire in (SILENT, self._foreseen()):
            self.post(label, wire, missed)
        else:
            self.enter(label, wire, missed=missed)

    def enter(self, label: str, wire: str, posted: bool = False, missed: Sequence[str] = ()) -> None:
        """Posts this rank's next call, with a program that is new to it or that nobody foresaw. Returns when every rank
        has posted its own call and all communicate alike. ``posted``: whether the others know of the call. Raises
        `RankError`."""
        if self.board is None:
            if not posted:
                self.post(label, wire, missed)
            return
        said = f"{label}{COMMUNICATING}{wire}"
        if posted:
            self._put(Posted(self.count, MEETS, said, self.hypers))
        else:
            self.post(said)
        found = self._verdict(_wire, _wire)
        if found.alike:
            self._put(Posted(self.count, wire, label, self.hypers, _digest(missed)))
            return
        message = found.difference(self.mesh.world)
        if any(one.wire != MEETS for one in found.posted.values()):  # it has gone on
            message = f"{message}\n{CLOSED}"
            self.board.fail(message)
            self.leave(message)
        else:
            self.returned()
        raise RankError(message)

    def refuse(self, reason: str) -> None:
        """Returns if every rank refuses its call for this reason; otherwise raises `RankError`, as the others do."""
        self.post(REFUSED + reason)
        try:
            self.meet(REFUSED + reason)
        finally:
            self.returned()

    def refusal(self, error: Exception) -> str:
        """The message to the others about a call that this rank refuses. Raises `RankError` if the call failed because
        ranks called with different programs."""
        if (lost := self.parting(error)) is not None:
            raise RankError(lost) from error
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

    @contextmanager
    def refusing(self, own: bool = False) -> Iterator[None]:
        """Makes a refusal on this rank an error on every rank: the others may be on their way into a collective.
        ``own``: it may be an exception of the user's, which comes out of this rank even if the others do not raise it.
        """
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            try:
                self.refuse(self.refusal(error))
            except RankError as heard:
                if not own:
                    raise
                error.add_note(str(heard))
            raise

    @contextmanager
    def meeting(self, label: str) -> Iterator[None]:
        """For work that is no program: all ranks do it, or none. If a rank is lost in it, the others say which."""
        self.post(label)
        try:
            self.meet(label)
            with self.naming():
                yield
        finally:
            self.returned()

    @contextmanager
    def together(self, label: str) -> Iterator[None]:
        """A `meeting` that no rank goes on from if one fails alone in it."""
        with self.abandoning(), self.meeting(label):
            yield

    @contextmanager
    def abandoning(self, cause: str = "") -> Iterator[None]:
        """Inside, if this rank fails alone, the others hear that, and raise it. ``cause``: why a world of one cannot go
        on either."""
        try:
            yield
        except BaseException as error:
            if self.closed is None and not isinstance(error, RankError) and (cause or self.mesh.world > 1):
                self.abandon(f"{cause}It said:\n{type(error).__name__}: {error}")
            raise

    @contextmanager
    def naming(self) -> Iterator[None]:
        """If common work fails because a rank is gone, or does something else, raises an error that names it."""
        try:
            yield
        except BaseException as error:
            self.returned()
            if isinstance(error, RankError) or not isinstance(error, RuntimeError):
                raise
            if (reason := self.reason(error)) is None:
                raise
            raise RankError(reason) from error

    def tell(self, error: str) -> None:
        """Tells the others that this call failed here; `told` is what they hear."""
        if self.board is not None:
            made = self.board.row(self.mesh.rank).call(self.count)
            call = f"{nth(self.count)} call, {made.label if made is not None else ''}"
            self.board.tell(
                self.count,
                f"Rank {self.mesh.rank} failed in its {call}, so nothing was updated, and all ranks can go on with the "
                f"next. It said:\n{error}",
            )

    def told(self) -> str | None:
        """Why this call failed on another rank."""
        return self.board.told(self.count) if self.board is not None else None

    def abandon(self, message: str) -> None:
        """No rank can go on, for this reason; those that wait for this one fail now, and raise it."""
        if self.board is None:
            self.closed = message
            return
        message = f"Rank {self.mesh.rank} failed in its {nth(self.count)} call. {message}\n{CLOSED}"
        with suppress(StoreError):
            self.board.fail(message)
            if self.watchdog is not None:
                self.watchdog.end()
                self.watchdog.cut()
        self.leave(message)

    def _verdict(self, same: Callable[[Posted], str], part: Callable[[Posted], str], decided: bool = True) -> Verdict:
        """The verdict on all ranks' posts of this call: see `meeting`."""
        assert self.board is not None
        mine = self.board.row(self.mesh.rank).call(self.count)
        assert mine is not None
        meeting, before = Meeting(self.board, mine, timeout(self.mesh), decided), self._met
        self._met = meeting
        with self._leaving():
            return meeting.verdict(same, part, before)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """If it turns out that no rank goes on, ends this rank too."""
        try:
            yield
        except Broken as error:
            self.leave(str(error))
            raise RankError(str(error)) from None

    def reason(self, error: Exception) -> str | None:
        """Why this rank's collective failed with this error, if the reason is what another rank did."""
        if self.board is None:
            return None
        try:
            message = self.board.error() or why(self.board, self.count, str(error))
            if message is None:
                return None
            self.board.fail(message)
            if self.watchdog is not None:
                self.watchdog.end()
        except StoreError as gone:
            if not is_lost(str(error)):
                return None
            message = f"{gone}\nIt is so in this rank's {nth(self.count)} call, whose connections broke."
        self.leave(message)
        return message

    def parting(self, error: BaseException) -> str | None:
        """Why a GPU broke off with this error, if ranks called with different programs or rates.

        Each call compares these on the device, where the comparison costs nothing but can only stop the call. It stops
        before anything is updated, but this process can no longer use the GPU, and the error gives no reason. The board
        has it.
        """
        found = parting_of(self.board, self.count, error)
        self.closed = found or self.closed  # without an end of the process group: NCCL would wait for the lost GPU
        return found

    def leave(self, reason: str) -> None:
        """Ends this rank's part in the process group, so that ranks that wait for it fail instead of hanging."""
        self.closed = reason
        close()  # which waits for what a GPU still does
        if self.watchdog is not None:
            self.watchdog.end()


def _label(call: Posted) -> str:
    """What a rank calls, whether or not it has decided to."""
    return call.label.removeprefix(UNDECIDED)


def _wire(call: Posted) -> str:
    """The wire that it goes on with, or would go on with."""
    return call.label.rpartition(COMMUNICATING)[2] if call.wire == MEETS else call.wire


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(repr(sorted(names)).encode()).hexdigest()[:8] if names else ""


def _finish(board: Board, made: list[int], watchdog: Watchdog | None = None) -> None:
    """Says on the board that this process ends."""
    if watchdog is not None:
        watchdog.stop()
        watchdog.wait_until_stopped()
    # An error of the GPU that nobody caught, met outside of a call of ours: the reason is said here at the latest.
    if (reason := parting_of(board, made[0], getattr(sys, "last_value", None))) is not None:
        log.error("%s", reason)
    with suppress(StoreError):
        board.end(made[0])
