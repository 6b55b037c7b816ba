"""The board of calls: what a rank reads there of others that do something else, wait, or are gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled.distributed import call_log, watchdog
from fsdp_compiled.distributed.call_log import Calls, _finish
from fsdp_compiled.distributed.call_store import MEETS, Board, Posted
from fsdp_compiled.distributed.mesh import Mesh, RankError
from fsdp_compiled.distributed.watchdog import Watchdog, connections, cut
from fsdp_compiled.ir.program import SILENT

CLOSED = RuntimeError("[pair.cc] Connection closed by peer")


def boards(world: int) -> list[Calls]:
    """Each rank's side of one board, in this process."""
    store = dist.HashStore()
    found = []
    for rank in range(world):
        calls = Calls(Mesh(torch.device("cpu")))
        calls.mesh, calls.board = Mesh(torch.device("cpu"), shard=world, rank=rank), Board(store, rank, world)
        found.append(calls)
    return found


def together(work: Callable[[Calls], Any], ranks: Sequence[Calls]) -> list[Any]:
    """What it returns or raises on each rank, each a thread."""

    def run(calls: Calls) -> Any:
        try:
            return work(calls)
        except RankError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


@contextmanager
def alive(*ranks: Calls) -> Iterator[None]:
    """These give signs of life, as the thread of each one's watchdog would."""
    done = Event()

    def beat() -> None:
        while not done.wait(0.01):
            for calls in ranks:
                assert calls.board is not None
                calls.board.beat(0.05)

    with ThreadPoolExecutor(1) as pool:
        beating = pool.submit(beat)
        try:
            yield
        finally:
            done.set()
            beating.result()


def end(calls: Calls) -> None:
    assert calls.board is not None
    _finish(calls.board, calls._made)


def test_ranks_that_make_the_same_call_meet() -> None:
    first, second = boards(2)
    for calls in (first, second):
        calls.post("step (a)")
    assert together(lambda calls: calls.meet("step (a)"), [first, second]) == [True, True]
    assert first.reason(RuntimeError("out of memory")) is None


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    first, second = boards(2)
    for _ in range(3):
        first.post("step (a)")
    second.post("step (a)")
    end(second)
    first.post("full_state_dict")
    with pytest.raises(RankError, match=r"rank 0: full_state_dict\n  rank 1: gone after 1 call\n.*sharded\.join"):
        first.meet("full_state_dict")


def test_a_process_that_a_rank_forked_says_nothing_when_it_ends() -> None:
    first, second = boards(2)
    assert second.board is not None and first.board is not None
    for process, ended in ((second.board._process + 1, None), (os.getpid(), 0)):
        second.board._process = process
        end(second)
        assert first.board.row(1).ended == ended


def test_a_rank_that_ended_after_the_same_call_is_met() -> None:
    first, second = boards(2)
    for calls in (first, second):
        calls.post("full_state_dict")
    end(second)
    first.meet("full_state_dict")


@pytest.mark.parametrize("ahead", [1, 70])
def test_who_is_gone_is_read_off_the_board_when_a_connection_closes(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a last word of its own, and however far behind it was."""
    monkeypatch.setattr(watchdog, "BEAT", 0.1)
    monkeypatch.setattr(Board, "LAG", 0.2)
    first, second, third = boards(3)
    for calls in (first, second, third):
        calls.post("step (a)")
    for _ in range(ahead):
        for calls in (first, third):
            calls.post("step (b)")
    with alive(first, third):
        reason = first.reason(CLOSED)
    assert reason is not None and "Rank 1 is gone: the connection broke in or after its 1st call, step (a)" in reason
    assert third.reason(RuntimeError("anything")) == reason  # left there for the others


def test_an_error_of_this_ranks_own_is_not_blamed_on_one_that_is_slow() -> None:
    first, second = boards(2)
    for _ in range(2):
        first.post("step (a)")
    second.post("step (a)")
    assert first.reason(RuntimeError("out of memory")) is None


def test_a_call_that_a_rank_has_not_written_yet_is_waited_for_before_anybody_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of thousands of ranks, each writes its row once a second, and may be further than that says."""
    monkeypatch.setattr(watchdog, "BEAT", 0.1)
    monkeypatch.setattr(Board, "LAG", 0.3)
    for broken in (True, False):
        three = boards(3)
        for calls in three:
            assert calls.board is not None
            calls.board.interval = 0.2
            for wire in ("aa", "bb" if calls is three[2] and broken else "aa"):
                calls.post(f"step ({wire})", wire)
            assert calls.board.row(calls.mesh.rank).newest == 2
        assert three[0].board is not None and three[0].board.row(2).newest == 1  # as the others see it
        with alive(*three):
            reason = three[0].reason(CLOSED)
        assert (reason is not None) == broken
        if broken:
            assert "  rank 1: step (aa)\n  rank 2: step (bb)" in str(reason)
            assert three[1].reason(CLOSED) == reason


def test_a_reason_that_was_not_there_yet_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "LAG", 0.01)
    first, second = boards(2)
    first.post("step (a)")
    assert first.reason(RuntimeError("sizes differ")) is None
    second.post("forward (a)")
    for calls in (first, second):
        assert "rank 0: step (a)\n  rank 1: forward (a)" in str(calls.reason(RuntimeError("sizes differ")))


def test_another_call_is_the_reason_of_any_failure() -> None:
    first, second = boards(2)
    first.post("step (a)")
    second.post("forward (a)")
    reason = first.reason(RuntimeError("sizes differ"))
    assert reason is not None and "rank 0: step (a)\n  rank 1: forward (a)" in reason


def test_a_refusal_reaches_those_who_wait() -> None:
    first, second = boards(2)
    first.post("step (a)")
    with pytest.raises(RankError, match="A rank refused its call"):
        second.refuse("bad batch")
    with pytest.raises(RankError, match="rank 1: refused: bad batch"):
        first.meet("step (a)")


@pytest.mark.parametrize(("wire", "loop", "ends"), [(SILENT, False, False), (SILENT, True, True), ("aa", False, True)])
def test_nobody_waits_for_another_in_a_call_that_sends_nothing(wire: str, loop: bool, ends: bool) -> None:
    """So a refusal ends nothing there, but in a loop, whose backward would wait; who sends something waits at once."""
    first, second = boards(2)
    first.post("forward (a)", wire)
    if not loop:
        second.take_part = lambda: lambda call, quiet: False
    with pytest.raises(RankError, match="A rank refused its call"):
        second.refuse("bad batch")
    assert second.board is not None
    assert (second.board.error() is not None, second.closed is not None) == (ends, ends)


def test_a_program_that_sends_nothing_enters_beside_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "timeout", lambda mesh: 0.05)
    for wire, alike in ((SILENT, True), ("aa", False)):
        first, second = boards(2)
        first.post("forward (a)", SILENT)  # has its program
        if alike:
            second.enter("forward (b)", wire)
        else:
            with pytest.raises(
                RankError, match=r"(?s)rank 0: forward \(a\)\n  rank 1: forward \(b\), communicating aa"
            ):
                second.enter("forward (b)", wire)
        assert (second.closed is None) == alike


def test_a_rank_that_meets_others_hears_why_one_of_them_is_not_coming() -> None:
    first, second = boards(2)
    for _ in range(2):
        first.post("full_state_dict")
    assert second.board is not None
    second.board.fail("because")
    with pytest.raises(RankError, match="because"):
        first.meet("full_state_dict")


def test_a_rank_that_lives_and_never_comes_is_waited_for_no_longer_than_the_process_group_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_log, "timeout", lambda mesh: 0.05)
    first, second = boards(2)
    second.post("step (a)")
    for _ in range(2):
        first.post("step (a)")
    with pytest.raises(RankError, match=r"(?s)did not come in time.*rank 1: still absent after 1 call\nIt hangs"):
        first.meet("step (a)")
    reason = first.reason(RuntimeError("Timed out waiting 1800000ms for recv operation to complete"))
    assert reason is not None and "rank 1: still absent after 1 call" in reason


class Told(Watchdog):
    """A watch that keeps what it found instead of acting on it."""

    found: str | None = None

    def _break(self, running: watchdog.Running, reason: str) -> None:
        self.found = reason
        self.end()


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Told]]:
    """Of three ranks, that look after a hundredth of a second."""
    monkeypatch.setattr(watchdog, "PATIENCE", 0.01)
    store = dist.HashStore()
    made = [Told(Board(store, rank, 3), cuts=False) for rank in range(3)]
    yield made
    for one in made:
        one.stop()
        one.wait_until_stopped()
        assert one._thread is None or not one._thread.is_alive()


def begin(one: Told, number: int, label: str, wire: str) -> None:
    call = Posted(number, wire, label)
    one._board.post(call)
    one.begin(call)


def looked(one: Told, often: int = 10) -> Told:
    """After it has looked at the board so many times, found something, or has nothing more to look at."""
    until, running = time.monotonic() + 20, one._running
    while running is not None and running is one._running and running.looked < often and len(running.agree) < 2:
        assert time.monotonic() < until
        time.sleep(0.005)
    return one


def test_whose_collectives_differ_is_found_whoever_it_is(watches: list[Told]) -> None:
    for rank, wire in enumerate(("aa", "aa", "bb")):
        begin(watches[rank], 5, "forward (a)" if wire == "bb" else "step (a)", wire)
    for one in watches:
        found = looked(one).found
        assert found is not None and "  rank 1: step (a)\n  rank 2: forward (a)" in found


def test_one_that_sends_nothing_is_found_by_those_who_wait(watches: list[Told]) -> None:
    begin(watches[0], 5, "step (a)", "aa")
    begin(watches[1], 5, "forward (a)", SILENT)
    time.sleep(0.1)
    assert watches[1]._running is None or watches[1]._running.looked == 0  # it waits for nobody itself
    found = looked(watches[0]).found
    assert found is not None and "rank 0: step (a)\n  rank 1: forward (a)" in found


def test_one_who_went_on_after_another_call_is_found(watches: list[Told]) -> None:
    begin(watches[0], 5, "step (a)", "aa")
    begin(watches[1], 5, "forward (a)", "bb")
    begin(watches[1], 6, "step (a)", "aa")
    found = looked(watches[0]).found
    assert found is not None and "rank 1: forward (a)\n  rank 2: is not there yet" in found
    assert looked(watches[1]).found == found  # alone at its call, it hears it from the board


def test_ranks_that_agree_may_take_as_long_as_they_like(watches: list[Told]) -> None:
    for one in watches:
        begin(one, 5, "step (a)", "aa")
    for one in watches:
        running = one._running
        assert looked(one).found is None and running is not None and running.agree == {0, 1, 2} - {one._board.rank}


@pytest.mark.parametrize(
    ("number", "label", "wire"),
    [
        (4, "forward (a)", "bb"),  # late
        (69, "forward (a)", "bb"),  # so far ahead that its call 5 was overwritten
        (5, "step (b)", "aa"),  # other shapes, whose collectives pair up
        (5, "step (b)", MEETS),  # on its way into a compilation, where it meets the others
    ],
)
def test_what_may_still_go_well_is_left_alone(watches: list[Told], number: int, label: str, wire: str) -> None:
    begin(watches[0], 5, "step (a)", "aa")
    for other in watches[1:]:
        other._board.post(Posted(number, wire, label))
    assert looked(watches[0]).found is None
    assert watches[0]._board.error() is None


class Gone(dist.HashStore):
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        raise dist.DistNetworkError("Connection reset by peer")


class Ended(Watchdog):
    """A watch that would have ended the process."""

    reason: str | None = None

    def _end_process(self, reason: str) -> None:
        self.reason = reason
        self.stop()


@pytest.mark.parametrize(
    ("call", "done", "ends"),
    [
        (Posted(5, "aa", "step (a)"), None, True),  # in it
        (Posted(5, "aa", "step (a)"), False, True),  # it returned, and a GPU is still at it
        (Posted(5, "aa", "step (a)"), True, False),  # the GPU has done it: a script may write what it has trained
        (None, None, False),
    ],
)
def test_without_a_store_a_call_has_the_grace_to_end(
    call: Posted | None, done: bool | None, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.2)
    one = Ended(Board(Gone(), 0, 2), cuts=False)
    if call is not None:
        one.begin(call)
        if done is not None:
            one.end(lambda: lambda: bool(done))
    else:
        one.start()
    assert one._stop.wait(1.0) == ends
    one.stop()
    one.wait_until_stopped()
    assert (one.reason is not None) == ends
    assert not ends or "The store at which ranks meet does not answer" in str(one.reason)


class Slow(dist.HashStore):
    """A store that takes so many seconds to answer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.cut = seconds, Event()

    def check(self, keys: list[str]) -> bool:
        if self.cut.wait(self.seconds):
            raise dist.DistNetworkError("Connection reset by peer")
        return False


@pytest.mark.parametrize(("seconds", "is_cut"), [(60.0, True), (0.1, False)])
def test_a_store_that_never_answers_is_cut_off_and_a_slow_one_is_not(
    seconds: float, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Slow(seconds)
    monkeypatch.setattr(watchdog, "SILENCE", 0.4)
    monkeypatch.setattr(watchdog, "cut_from_store", lambda port: store.cut.set())
    board = Board(store, 0, 2)
    one = Watchdog(board, cuts=False)
    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(one._watch_store, 1)
        with pytest.raises(RankError, match="does not answer") if is_cut else nullcontext():
            for _ in range(1 if is_cut else 12):
                assert board.error() is None
        one.stop()
        watched.result(10)
    assert store.cut.is_set() == is_cut and board.unanswered is None


def test_without_a_store_each_way_to_ask_it_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _), ended = boards(2), []
    monkeypatch.setattr(call_log, "close", lambda: ended.append(True))
    first.post("step (a)")
    assert first.board is not None
    first.board.store = Gone()
    for ask in (lambda: first.meet("step (a)"), first.told, lambda: first.post("step (b)")):
        with pytest.raises(RankError, match=r"(?s)at which ranks meet does not answer.*Connection reset.*checkpoint"):
            ask()
    assert ended == [True] and first.reason(RuntimeError("sizes differ")) is None
    with pytest.raises(RankError, match=r"An earlier call failed for good:\nThe store"):
        first.post("step (c)")


def test_only_connections_that_both_ends_know_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        pairs = []
        for listening in (server, server, store):
            near = socket.create_connection(listening.getsockname())
            pairs.append((near, listening.accept()[0]))
        port = store.getsockname()[1]
        (near, far), (other, _), (asking, _) = pairs
        known = connections(port)
        assert all(port not in (ends[1], ends[3]) for ends in known)
        mine = {(*far.getsockname(), *far.getpeername())}
        before = len(os.listdir("/dev/fd"))
        assert mine < known and cut(mine) == 1 and cut(set()) == 0
        assert len(os.listdir("/dev/fd")) == before
        assert near.recv(1) == far.recv(1) == b""  # closed, for both
        for alive in (other, asking):
            alive.setblocking(False)
            with pytest.raises(BlockingIOError):
                alive.recv(1)
        for pair in pairs:
            for end in pair:
                end.close()


def test_sockets_that_are_looked_at_stay_as_they_are_whatever_the_scripts_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
        before = socket.getdefaulttimeout()
        try:
            socket.setdefaulttimeout(5.0)
            assert (*near.getsockname(), *near.getpeername()) in connections(None)
            blocking = [os.get_blocking(end.fileno()) for end in (near, far)]
            control = socket.socket(fileno=os.dup(near.fileno()))  # Python's own way
            assert not os.get_blocking(near.fileno())
        finally:
            socket.setdefaulttimeout(before)
        assert blocking == [True, True]
        for end in (near, far, control):
            end.close()
