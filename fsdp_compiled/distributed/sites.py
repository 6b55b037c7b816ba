"""Sites that come and go: which of them make an exchange of local steps, and what becomes of it if one is lost.

Each site is a job of its own, with a process group of its own. All ranks of all sites reach one store:

    model            a digest of what must be equal in all sites; the first site's
    beat/S           a number that site S raises every second; "gone" once it left, or another found it silent
    round            the number of the exchange that is next, R
    made/R           how many exchanges the weights have seen with which it begins
    here/R.A/S       site S has come to attempt A of exchange R: its `_Present`
    members/R.A      the sites that make it; written once, by the first site to see that all living ones are here
    votes/R.A        how many sites have received what the others sent
    verdict/R.A      "commit" or "abort"; written once

An exchange sends first, and moves no weights. A site whose ranks received all of it votes. When all sites have, the
verdict is commit, and each moves its weights. If a rank fails to receive, or a site falls silent before it voted, the
verdict is abort, and the sites that are left make the next attempt. So all of them move by the same mean, or none does.
A new site takes part in no mean: it receives what the others have after the exchange. If all are new, the one whose
weights have seen the most exchanges gives the others its own, unless there were weights that had seen more: whoever had
those may be silent and yet come back.

Members of each exchange, a commit that all vote for, and new members that are healed by others are torchft's ideas
(https://github.com/pytorch/torchft).
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdp_compiled.distributed.mesh import Mesh, RankError, from_first, said_by
from fsdp_compiled.torch_private.names import find

T = TypeVar("T")
BEAT, POLL = 1.0, 0.1  # seconds
TRIES = 3  # of an exchange among the same sites
SAID = 30.0  # seconds between two lines of the log about what is waited for
_NUMBERS = itertools.count()
log = logging.getLogger("fsdp_compiled")


class _Present(NamedTuple):
    """What a site says of itself when it comes to an exchange."""

    new: bool  # it takes the others' weights
    made: int  # exchanges that its weights have seen


class _Attempt(NamedTuple):
    round: int
    number: int
    old: list[int]  # sites that vote
    new: list[int]  # sites that get the first one's weights
    moves: bool  # whether the mean of the old ones moves them; no: all sites are new
    made: int  # how many exchanges the weights have seen after it

    @property
    def key(self) -> str:
        return f"{self.round}.{self.number}"

    @property
    def sites(self) -> list[int]:
        return sorted((*self.old, *self.new))

    def __str__(self) -> str:
        mean = f", the mean of sites {', '.join(map(str, self.old))}" * self.moves
        new = f", from site {self.old[0]} to the new {', '.join(map(str, self.new))}" * bool(self.new)
        return f"exchange {self.round}{mean}{new}"


class Sites:
    """This site among the others.

    ``new``: whether it is still to get the others' weights; ``made``: how many exchanges its weights have seen;
    ``group``: the name of the process group of this rank and of those in its place in the other sites. Nothing is
    reached before the first `exchange`.
    """

    def __init__(self, endpoint: str, least: int, patience: float, mesh: Mesh, digest: str) -> None:
        """``digest``: of the program and of what else must be equal in all sites."""
        self.new, self.made, self.number = True, 0, 0
        self.group = f"fsdp_compiled sites {next(_NUMBERS)}"
        self._endpoint, self._least, self._patience = endpoint, least, patience
        self._mesh, self._digest = mesh, digest
        self._round = self._attempt = 0
        self._store: Any = None
        self._group: Any = None
        self._peers: Any = None  # a connection to the store at which groups find their addresses
        self._in_group: list[int] = []  # sites of a group that has not failed
        self._seen: dict[int, tuple[bytes, float]] = {}  # by site, its last beat, and when it was seen first
        self._before: list[int] = []  # the sites of the last exchange
        self._voted = ""  # the last attempt for which it did
        self._said = 0.0  # when the log said last what is waited for

    def exchange(
        self,
        send: Callable[[int], T],
        move: Callable[[T], None],
        shared: Callable[[], Sequence[torch.Tensor]],
        take: Callable[[list[torch.Tensor]], None],
    ) -> None:
        """Makes one exchange with the sites that are there, or gets their weights if this site is new. Collective.

        ``send``: sends to so many sites over `group`, waits for what they send, and changes nothing. ``move``: moves
        the weights by what it returned. ``shared``: the tensors that a new site gets from another; ``take``: goes on
        from those. Raises `RankError` where the store is lost, or other sites train something else.
        """
        self._said = time.monotonic()
        failed: list[list[int]] = []  # the sites of each attempt
        while True:
            attempt = self._meet()
            sent: list[T] = []
            reason = ""
            if attempt.moves:
                name = f"{attempt.key}/mean"
                reason = self._over(attempt.old, name, lambda: sent.append(send(len(attempt.old))), self._in_group)  # noqa: B023
            if not self._ask(lambda: self._verdict(attempt, reason)):  # noqa: B023
                self._attempt, self._in_group = self._attempt + 1, []
                failed.append(attempt.old)
                if failed[-TRIES:] == [attempt.old] * TRIES:
                    raise RankError(
                        f"{attempt}: it failed {TRIES} times, with no site lost. {reason or 'Another says why.'} If "
                        f"what is sent takes longer than Rendezvous.patience={self._patience:g} s, give more."
                    )
                continue
            if sent:
                move(sent[0])
            source, got = attempt.old[0], None
            for one in attempt.new:  # each by itself: one that is lost keeps nothing from another
                if self.number in (source, one):
                    given = [tensor.clone() if self.number == one else tensor for tensor in shared()]
                    reason = self._over([source, one], f"{attempt.key}/{one}", lambda: self._give(given))  # noqa: B023
                    if reason:
                        self._log("the weights of site %d did not reach site %d: %s", source, one, reason)
                    elif self.number == one:
                        got = given
            if self.number in attempt.new:
                if got is None:
                    continue
                take(got)
            self.new, self.made, self._round, self._attempt = False, attempt.made, attempt.round + 1, 0
            self._in_group = attempt.old if attempt.moves and not attempt.new else []
            if attempt.sites != self._before:
                self._log("%s", attempt)
            self._before = attempt.sites
            return

    # What the sites agree on. A site's first rank alone asks the store; the others hear it from that one.

    def _ask(self, look: Callable[[], T | None]) -> T:
        """What the first rank finds, once it finds something; on every rank. Raises `RankError` on every rank."""
        while True:
            found: tuple[T | None, str] = None, ""
            if self._mesh.rank == 0:
                try:
                    found = look(), ""
                except dist.DistError as error:
                    found = None, self._lost(error)
                except RankError as error:
                    found = None, str(error)
            value, refused = from_first(found, self._mesh)
            if refused:
                raise RankError(refused)
            if value is not None:
                return value  # type: ignore[no-any-return]
            if self._mesh.rank == 0:
                time.sleep(POLL)

    def _meet(self) -> _Attempt:
        """The next attempt that this site takes part in."""
        attempt, self.number = self._ask(self._next)
        self._round, self._attempt = attempt.round, attempt.number
        return attempt

    def _next(self) -> tuple[_Attempt, int] | None:
        """One look at the store for that; None: not yet."""
        store = self._connected()
        if not self.number:
            if store.compare_set("model", "", self._digest).decode() != self._digest:
                raise RankError(
                    f"The sites that meet at {self._endpoint} train something else: their model, Policy.outer, "
                    "Policy.wire or number of ranks differs from this one's. Start all sites with the same script, on "
                    "as many ranks; for another training start another `fsdp-compiled rendezvous`."
                )
            store.compare_set("round", "", "0")
            self.number = store.add("sites", 1)
            self._live()
        key = f"{self._round}.{self._attempt}"
        if (found := self._members(key)) and self.number in found and key != self._voted:
            return self._attempt_of(found), self.number  # also where the others are through: they wait to give weights
        current = int(store.get("round"))
        if current != self._round:
            if not self.new:
                self._log(
                    "it was thought gone in exchange %d. It takes the others' weights: its steps since its last "
                    "exchange are lost", self._round,
                )  # fmt: skip
            self.new, self._round, self._attempt = True, current, 0
        elif found:  # without this site
            self._attempt += self._verdict_of(self._attempt_of(found)) is False
        else:
            store.set(f"here/{key}/{self.number}", json.dumps(_Present(self.new, self.made)))
            self._close(key)
        return None

    def _members(self, key: str) -> dict[int, _Present]:
        if not self._store.check([f"members/{key}"]):
            return {}
        return {int(site): _Present(*one) for site, one in json.loads(self._store.get(f"members/{key}")).items()}

    def _attempt_of(self, members: dict[int, _Present]) -> _Attempt:
        new = sorted(site for site, one in members.items() if one.new)
        old = sorted(members.keys() - new)
        first = old or [min(new, key=lambda site: (-members[site].made, site))]
        made = members[first[0]].made + bool(old)
        return _Attempt(self._round, self._attempt, first, sorted({*new}.difference(first)), bool(old), made)

    def _close(self, key: str) -> None:
        """Writes down who makes this attempt, if all living sites have come."""
        store = self._store
        alive = self._alive(range(1, store.add("sites", 0) + 1))
        there = [site for site in alive if store.check([f"here/{key}/{site}"])]
        members = {site: _Present(*json.loads(store.get(f"here/{key}/{site}"))) for site in there}
        before = int(store.get(f"made/{self._round}")) if store.check([f"made/{self._round}"]) else 0
        behind = all(one.new and one.made < before for one in members.values())
        if len(there) >= max(self._least, len(alive)) and not behind:
            store.compare_set(f"members/{key}", "", json.dumps(members))
        elif time.monotonic() - self._said > SAID:
            self._said = time.monotonic()
            text = "%d of %d living sites have come to exchange %d; it needs %d%s"
            lost = (
                f". The weights of {before} exchanges are with none of them. If the sites that had those are lost for "
                "good, start another `fsdp-compiled rendezvous`, and the sites from their checkpoints"
            )
            self._log(text, len(there), len(alive), self._round, self._least, lost * behind)

    def _alive(self, sites: Iterable[int]) -> list[int]:
        """Those whose beat changed within the patience; another that is found silent is written down as gone."""
        alive = []
        for site in sites:
            key, now = f"beat/{site}", time.monotonic()
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat == b"gone":
                continue
            if self._seen.get(site, (None, 0.0))[0] != beat:
                self._seen[site] = beat, now
            if now - self._seen[site][1] < self._patience:
                alive.append(site)
            elif self._store.compare_set(key, beat.decode(), "gone") == b"gone":
                self._log("site %d gave no sign of life for %g s: the others go on", site, self._patience)
        return alive

    def _verdict(self, attempt: _Attempt, reason: str) -> bool | None:
        """Whether all of its old sites have what the others sent; None: not known yet. ``reason``: why this site has
        not."""
        if self._voted != attempt.key:
            self._voted = attempt.key
            if reason:
                self._log("%s: it failed, and is made again. %s", attempt, reason)
                self._store.compare_set(f"verdict/{attempt.key}", "", "abort")
            elif self.number in attempt.old and self._store.add(f"votes/{attempt.key}", 1) == len(attempt.old):
                self._store.compare_set(f"verdict/{attempt.key}", "", "commit")
        return self._verdict_of(attempt)

    def _verdict_of(self, attempt: _Attempt) -> bool | None:
        store, verdict = self._store, f"verdict/{attempt.key}"
        if not store.check([verdict]):
            if len(self._alive(attempt.old)) == len(attempt.old):
                return None
            store.compare_set(verdict, "", "abort")
        if store.get(verdict) != b"commit":
            return False
        store.compare_set(f"made/{attempt.round + 1}", "", str(attempt.made))
        store.compare_set("round", str(attempt.round), str(attempt.round + 1))
        return True

    # What they send.

    def _over(self, sites: list[int], name: str, work: Callable[[], None], kept: Sequence[int] = ()) -> str:
        """Does it over a `group` of these sites, if this is one of them; returns why it failed on any rank, or ''.
        ``kept``: the sites of the group that there is and that all of them still have."""
        if self.number not in sites:
            return ""
        failure = None
        try:
            if len(sites) > 1 and sites != kept:
                self._join(name, sites)
            work()
        except RankError:
            raise
        except RuntimeError as error:  # another site's end is the most likely cause
            failure = f"{type(error).__name__}: {error}"
        return next(filter(None, said_by(failure, self._mesh)), "")

    def _join(self, name: str, sites: Sequence[int]) -> None:
        """Makes `group` anew, of gloo. Raises ``RuntimeError`` if one of the sites does not come."""
        place, count = sites.index(self.number), len(sites)
        if self._peers is None:
            self._peers = self._open()
        store = dist.PrefixStore(f"group/{name}/{self._mesh.rank}", self._peers)
        gloo = dist.ProcessGroupGloo(store, place, count, timedelta(seconds=self._patience))
        group = dist.ProcessGroup(store, place, count)
        kind = dist.ProcessGroup.BackendType.GLOO
        for device in {"cpu", self._mesh.device.type}:
            group._register_backend(torch.device(device), kind, gloo)
        group._set_default_backend(kind)
        group._set_group_name(self.group)
        if self._group is not None:
            find("torch.distributed.distributed_c10d._unregister_process_group")(self.group)
        find("torch.distributed.distributed_c10d._register_process_group")(self.group, group)
        self._group = group

    def _give(self, tensors: Sequence[torch.Tensor]) -> None:
        """From the first site of the group to the others."""
        for tensor in tensors:
            self._group.broadcast(tensor, 0).wait()

    # The store.

    def _connected(self) -> Any:
        if self._store is None:
            self._store = _Patient(self._open(), self._patience)
        return self._store

    def _open(self) -> Any:
        host, _, port = self._endpoint.rpartition(":")
        limit = timedelta(seconds=self._patience)
        return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=limit, wait_for_workers=False)

    def _live(self) -> None:
        """Gives signs of life until the process, or this object, ends."""
        store, key, ended = self._open(), f"beat/{self.number}", threading.Event()
        store.set(key, "0")
        beats = threading.Thread(target=_beat, args=(store, key, ended), daemon=True, name=f"fsdp_compiled {key}")
        beats.start()
        weakref.finalize(self, _leave, store, key, ended, beats)

    def _lost(self, error: Exception) -> str:
        return (
            f"The store at which sites meet, {self._endpoint}, does not answer ({error}). Is `fsdp-compiled "
            "rendezvous` running there? Start it again, and then the sites, from their checkpoints."
        )

    def _log(self, text: str, *values: Any) -> None:
        if self._mesh.rank == 0:
            log.warning(f"site %d: {text}", self.number, *values)


class _Patient:
    """A connection to the store, of which each call raises ``DistNetworkError`` if there is no answer for so long.

    PyTorch's own waits for as long as TCP does, which for a machine that stands still is forever.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._asked.put, None)
        threading.Thread(target=_serve, args=(self._asked,), daemon=True, name="fsdp_compiled store of sites").start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._store, name))

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(method(*args))
            except Exception as error:
                answer.set_exception(error)

        self._asked.put(run)
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            raise dist.DistNetworkError(f"no answer in {self._seconds:g} s") from None


def _serve(asked: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := asked.get()) is not None:
        work()
        del work  # or it would hold the connection until the next


def _beat(store: Any, key: str, ended: threading.Event) -> None:
    count = 0
    with suppress(dist.DistError):  # the next exchange says so
        while not ended.wait(BEAT):
            count += 1
            store.set(key, str(count))


def _leave(store: Any, key: str, ended: threading.Event, beats: threading.Thread) -> None:
    ended.set()
    beats.join(BEAT)
    with suppress(dist.DistError):
        store.set(key, "gone")
