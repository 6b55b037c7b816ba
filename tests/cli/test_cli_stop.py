"""How a rank hears that it shall stop: signals, the launcher's pipe, a launcher that is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from fsdp_compiled.cli import rank
from fsdp_compiled.cli.rank import STOP, Ranks, Stop


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The codes this process would have ended with; signals are as before afterwards."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield codes
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_and_the_second_ends(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stop, ranks = Stop(), Ranks()
    assert [stop.agreed(ranks) for _ in range(2)] == [0, 0]
    os.kill(os.getpid(), number)
    assert [stop.agreed(ranks) for _ in range(2)] == [0, number]  # the answer is that of the call before
    os.kill(os.getpid(), number)
    assert not ended, "at once after the first it is the same request: Slurm signals torchrun and its ranks alike"
    monkeypatch.setattr(rank, "SAME", 0.0)
    time.sleep(0.01)
    os.kill(os.getpid(), number)
    assert ended == [128 + number]


@pytest.mark.parametrize(("said", "expected"), [(b"t", signal.SIGTERM), (b"", signal.SIGINT)])
def test_the_launchers_pipe_says_which_signal_it_got(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, said: bytes, expected: signal.Signals
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv(STOP, str(reading))
    first, second = Stop(), Stop()  # ranks share the pipe
    assert first.asked == second.asked == 0
    os.write(writing, said)
    os.close(writing)
    assert first.asked == second.asked == first.asked == expected
    os.close(reading)


def test_a_rank_that_lost_its_launcher_stops(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STOP, raising=False)
    stop = Stop()
    assert stop.asked == 0
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.asked == signal.SIGTERM


def test_a_rank_that_waits_for_others_ends_with_its_launcher(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: nothing in it looks at what it is asked until there is a process group."""
    monkeypatch.setattr(rank, "PATIENCE", 0.01)
    reading, writing = os.pipe()
    monkeypatch.setenv(STOP, str(reading))
    stop, since = Stop(), time.monotonic()
    with stop.ending():
        time.sleep(0.1)
        assert not ended
        os.close(writing)
        while not ended:
            assert time.monotonic() - since < 20
            time.sleep(0.01)
    assert set(ended) == {130}
    os.close(reading)
