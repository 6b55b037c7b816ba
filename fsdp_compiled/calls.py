"""What each rank is doing, on a board that all ranks can read without a collective.

A collective that one rank never joins would keep the others waiting. So before every call a rank posts the call's
number and a *label*, what it calls with which shapes, in one short message to the store; nobody waits for an answer. A
rank that is about to do something rare (compile, refuse a batch, collect the whole model) reads the board first, and a
rank whose collective failed reads it afterwards, to say which rank did something else.
"""

from __future__ import annotations

import atexit
import time
import uuid
from collections.abc import Container, Sequence
from contextlib import suppress

import torch.distributed as dist

from fsdp_compiled.mesh import Mesh, RankError, exchange

REFUSED = "refused: "
LOST = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "remote process has terminated")
CURE = (
    "Give every rank a batch of the same shapes and dtypes in every call (drop or pad the last one), and the same "
    "learning rate."
)
JOIN = (
    "Give every rank as many batches (DistributedSampler pads), or train inside `with sharded.join():`, where a rank "
    "that has run out goes on with weight zero."
)


class Calls:
    """This rank's place on the board."""

    SLOTS = 64  # calls that a rank may run ahead of another before its posts are overwritten

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._made = [0]  # shared with what runs when Python exits
        self.store: dist.Store | None = None
        if mesh.world > 1:
            store = dist.distributed_c10d._get_default_store()
            self.store = dist.PrefixStore(f"fsdp_compiled/{exchange(uuid.uuid4().hex, mesh)[0]}", store)
            atexit.register(_finish, self.store, mesh.rank, self._made)

    @property
    def count(self) -> int:
        """How many calls this rank has made."""
        return self._made[0]

    def post(self, label: str) -> None:
        """This rank's next call."""
        self._made[0] += 1
        if self.store is not None:
            self.store.set(f"{self.mesh.rank}/{self.count % self.SLOTS}", f"{self.count}|{label}")

    def meet(self, label: str, known: Container[str] = ()) -> None:
        """Returns when every rank has posted this call with this label; raises `RankError` where one has another.

        A rank whose label is ``known`` runs that program now and waits for this one: so that it fails too, this rank
        leaves the process group.
        """
        if self.store is None:
            return
        labels = [self._wait_for(rank) for rank in range(self.mesh.world)]
        if all(other == label for other in labels):
            return
        message = different(labels)
        if any(other in known for other in labels):
            self.store.set("error", message)
            self.leave()
        raise RankError(message)

    def refuse(self, reason: str, known: Container[str]) -> None:
        """Returns where every rank refuses its call for this reason; else raises `RankError`, as on the others."""
        self.post(REFUSED + reason)
        self.meet(REFUSED + reason, known)

    def _wait_for(self, rank: int) -> str:
        """What the rank posted for this call, or that it ended before."""
        while True:
            number, label = self._posted(rank, self.count)
            if number >= self.count:
                return label
            if (ended := self._ended(rank)) is not None and ended < self.count:
                return f"gone after {_times(ended)}"
            time.sleep(0.005)

    def _posted(self, rank: int, count: int) -> tuple[int, str]:
        """What stands in this call's slot: the number of the call and its label; 0 where nothing does."""
        assert self.store is not None
        key = f"{rank}/{count % self.SLOTS}"
        if not self.store.check([key]):
            return 0, ""
        number, _, label = self.store.get(key).decode().partition("|")
        return int(number), label

    def _ended(self, rank: int) -> int | None:
        """How many calls the rank had made when its process ended; None while it runs."""
        assert self.store is not None
        key = f"{rank}/ended"
        return int(self.store.get(key)) if self.store.check([key]) else None

    def reason(self, error: Exception) -> str | None:
        """Why this rank's collective failed with this error, if it is for what another rank did."""
        if self.store is None:
            return None
        lost = any(text in str(error) for text in LOST)
        try:
            if self.store.check(["error"]):
                return self.store.get("error").decode()
            found = [self._now(rank, lost) for rank in range(self.mesh.world)]
        except (RuntimeError, dist.DistError):  # the store went with the rank that held it
            return f"Rank 0 is gone, while this rank makes its {_th(self.count)} call. {JOIN}" if lost else None
        if len(set(found)) == 1:
            return None
        message = different(found)
        self.store.set("error", message)
        self.leave()
        return message

    def _now(self, rank: int, lost: bool) -> str:
        number, label = self._posted(rank, self.count)
        if number == self.count:
            return label
        if not lost or number > self.count:  # it may be slow, or ahead: that made no call fail
            return self._posted(self.mesh.rank, self.count)[1]
        return f"gone after {_times(max(self._posted(rank, slot)[0] for slot in range(self.SLOTS)))}"

    def leave(self) -> None:
        """Ends this rank's part in the process group, so that ranks that wait for it fail instead of hanging."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _finish(store: dist.Store, rank: int, made: list[int]) -> None:
    """Says on the board that this process ends, and after how many calls."""
    with suppress(RuntimeError, dist.DistError):  # the store goes with the rank that holds it
        store.set(f"{rank}/ended", str(made[0]))


def _times(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def _th(count: int) -> str:
    return f"{count}{'th' if 10 < count % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(count % 10, 'th')}"


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
    return "\n".join(["The ranks called with different batches or rates, so nothing was updated:", *lines, CURE])
