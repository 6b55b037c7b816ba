"""Ranks find out whether all of them made the same call, by a few short messages each, however many ranks there are.

    rank 0: 7 save to runs/a    +1 -> 1 of 3        looks for a verdict, less and less often
    rank 1: 7 save to runs/a    +1 -> 2 of 3        the same
    rank 2: 7 save to runs/a    +1 -> 3 of 3        leaves the verdict: alike

Each rank adds one to the count of ranks with the same call. The rank that completes the count leaves the verdict for
all. A rank that came with another call, went on without meeting, ended or never came makes that impossible. So each
rank looks at the next one meanwhile: where any two ranks differ, two neighbours differ. The first rank that sees a
difference reads what all ranks posted, and leaves that as the verdict.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdp_compiled.distributed.call_store import ABSENT, MEETS, UNDECIDED, Board, Posted, Row, different, times
from fsdp_compiled.distributed.mesh import RankError

SHOWN = 16  # ranks at most whose calls a verdict holds
POLL = 0.005  # seconds between two looks, at first
SCAN = 60.0  # seconds in which one rank has read what all posted

Read = Callable[[Posted], str]


class Broken(RankError):
    """No rank goes on, for the reason that stands on the board."""


@dataclass(frozen=True)
class Verdict:
    """What the ranks posted. ``alike``: all the same; ``near``: the same in part; ``posted``: the calls by rank, if
    they are neither. With more than `SHOWN` ranks, it has some ranks with each kind of call."""

    alike: bool
    near: bool
    posted: Mapping[int, Posted]

    @classmethod
    def of(cls, posted: Mapping[int, Posted], same: Read, part: Read) -> Verdict:
        alike, near = (len({read(one) for one in posted.values()}) == 1 for read in (same, part))
        if len(posted) > SHOWN:
            first: dict[Posted, int] = {}  # those that went on come before those that meet
            for rank, one in sorted(posted.items(), key=lambda pair: (pair[1].wire == MEETS, pair[0])):
                first.setdefault(one, rank)
            posted = {rank: posted[rank] for rank in sorted({0, *list(first.values())[:SHOWN]})}
        return cls(alike, near, posted)

    def difference(self, world: int) -> str:
        """The sentence for ranks that are not alike, of ``world`` ranks."""
        return different({rank: call.label for rank, call in self.posted.items()}, world)

    def written(self) -> str:
        return json.dumps((self.alike, self.near, list(self.posted.items())))

    @classmethod
    def read(cls, text: str) -> Verdict:
        alike, near, posted = json.loads(text)
        return cls(alike, near, {rank: Posted(*one) for rank, one in posted})


class Meeting:
    """The meeting of one call. ``decided``: whether to wait for calls that a rank has yet to decide on; ``limit``:
    seconds to wait for a rank."""

    def __init__(self, board: Board, mine: Posted, limit: float, decided: bool = True) -> None:
        self._board, self._mine, self._decided = board, mine, decided
        self._until = time.monotonic() + limit
        self._key = f"meet/{mine.number}/{'decided' if decided else 'undecided'}"
        self._counts: list[str] = []

    def verdict(self, same: Read, part: Read, before: Meeting | None) -> Verdict:
        """The verdict, once every rank has posted this call, ended, or failed to come in time; raises `Broken`.

        ``same``: what must be equal in ranks' posts for them to be alike; ``part``: for them to be near. ``before``:
        this rank's last meeting; its counts are removed once nobody can be in it.
        """
        board, began = self._board, time.monotonic()
        self._counts = [f"{self._key}/{_digest(part(self._mine))}/{_digest(same(self._mine))}"]
        if same is not part:
            self._counts.insert(0, self._counts[0].rpartition("/")[0])
        # The count of those that are alike comes first, so it is whole once the count of those that are near is.
        if [board.add(key) for key in reversed(self._counts)][-1] == board.world:
            found = Verdict(board.add(self._counts[-1], 0) == board.world, True, {})
            board.set(f"{self._key}/verdict", found.written())
            if before is not None and before._key != self._key:  # a call may meet twice
                before._forget()
            return found
        while True:
            odd = self._is_odd((board.rank + 1) % board.world, part)
            if (text := board.get(f"{self._key}/verdict")) is not None:
                return Verdict.read(text)
            self._check()
            late = time.monotonic() - self._until
            if (odd or late > 0) and (board.add(f"{self._key}/scans") == 1 or late > SCAN):
                found = Verdict.of({rank: self.wait_for(rank) for rank in range(board.world)}, same, part)
                board.set(f"{self._key}/verdict", found.written())
                return found
            waited = time.monotonic() - began
            time.sleep(min(3 * board.interval, max(POLL, board.interval / 4, waited / 8)))

    def wait_for(self, rank: int) -> Posted:
        """What the rank posted for this call; or that it ended before, or did not come in time."""
        while True:
            row = self._board.row(rank)
            if (posted := self._posted(row)) is not None:
                return posted
            self._check()  # an error from a call before this one, which that rank will not survive
            if row.ended is not None:
                return Posted(self._mine.number, MEETS, f"gone after {times(row.ended)}")
            if time.monotonic() > self._until:
                return Posted(self._mine.number, MEETS, f"{ABSENT} after {times(row.newest)}")
            time.sleep(max(POLL, self._board.interval))

    def _posted(self, row: Row) -> Posted | None:
        """The post of this call; or of a later one, if the rank is so far ahead that this one was dropped."""
        found = row.call(self._mine.number) or (row.calls[0] if row.calls else None)
        if found is None or found.number < self._mine.number:
            return None
        return None if self._decided and found.label.startswith(UNDECIDED) else found

    def _is_odd(self, rank: int, part: Read) -> bool:
        """Whether the rank will never be counted with this one."""
        row = self._board.row(rank)
        posted = self._posted(row)
        if posted is None or row.ended is not None:
            return row.ended is not None
        return posted.wire != self._mine.wire or part(posted) != part(self._mine)

    def _check(self) -> None:
        if (message := self._board.error()) is not None:
            raise Broken(message)

    def _forget(self) -> None:
        for key in (*self._counts, f"{self._key}/verdict", f"{self._key}/scans"):
            self._board.forget(key)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
