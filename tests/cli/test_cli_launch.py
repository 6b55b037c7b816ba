"""The launcher, with ranks that are a few lines of Python and need no torch."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_compiled.cli.launch import launch, restarting
from fsdp_compiled.cli.options import TrainOptions
from fsdp_compiled.cli.rank import FAILURE, STOP, tell_failure
from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.runtime.checkpoint.writing import SaveError

RANK = "import os, select, sys, time; rank = int(os.environ['RANK'])\n"
UNTIL_STOPPED = f"select.select([int(os.environ['{STOP}'])], [], [], 30); sys.exit(130)"


def ranks(code: str, logs: Path, world: int = 2) -> int:
    return launch([sys.executable, "-c", RANK + code], world, logs)


def interrupt(when: Path, times: int = 1, number: int = signal.SIGINT) -> None:
    """Sends this process SIGINT, as Ctrl-C would, or another signal, once a rank has made the file `when`."""

    def send() -> None:
        while not when.exists():
            time.sleep(0.02)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=send, daemon=True).start()


def test_ranks_know_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"
    assert ranks(f"print(*(os.environ[name] for name in {names}), file=sys.stderr)", tmp_path) == 0
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert [(tmp_path / f"rank{r}.txt").read_text() for r in (0, 1)] == [f"2 {r} {threads}\n" for r in (0, 1)]


def test_a_failure_ends_the_others_and_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = f"if rank == 1: open(os.environ['{FAILURE}'], 'w').write('rank 1 failed: no luck'); sys.exit(3)\n"
    began = time.monotonic()
    assert ranks(code + "time.sleep(60)", tmp_path) == 3
    assert time.monotonic() - began < 40  # the other sleeps for 60
    assert capfd.readouterr().err.count("rank 1 failed: no luck") == 1


def test_a_rank_that_dies_without_a_word_shows_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks("print('last words', file=sys.stderr); sys.exit(rank * 5)", tmp_path) == 5
    assert "rank 1 failed with exit code 5\nlast words" in capfd.readouterr().err


def test_a_killed_rank_is_blamed_before_those_that_lost_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "if rank == 0: os.kill(os.getpid(), 9)\n"
        f"time.sleep(0.3); open(os.environ['{FAILURE}'], 'w').write('connection lost'); sys.exit(1)"
    )
    assert ranks(code, tmp_path) == 1
    told = capfd.readouterr().err
    assert "rank 0 was ended by SIGKILL" in told and "connection lost" not in told


def test_the_first_interrupt_stops_ranks_by_the_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)  # what runs in the background is born with SIGINT ignored
    interrupt(tmp_path / "ready")
    assert ranks(f"open({str(tmp_path / 'ready')!r}, 'w')\n{UNTIL_STOPPED}", tmp_path) == 130
    assert "stopping after the current step" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_ranks_whose_launcher_is_killed_stop(tmp_path: Path) -> None:
    rank = RANK + f"open({str(tmp_path)!r} + f'/began-{{rank}}', 'w')\n"
    rank += f"found = select.select([int(os.environ['{STOP}'])], [], [], 60)[0]\n"
    rank += f"os.mkdir({str(tmp_path)!r} + f'/stopping-{{rank}}' * bool(found))"
    code = "import pathlib, sys; from fsdp_compiled.cli.launch import launch\n"
    code += f"launch([sys.executable, '-c', {rank!r}], 2, pathlib.Path({str(tmp_path)!r}))"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: len(list(tmp_path.glob("began-*"))) == 2)
    launcher.kill()
    launcher.wait()
    until(lambda: len(list(tmp_path.glob("stopping-*"))) == 2)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_second_interrupt_kills(tmp_path: Path) -> None:
    interrupt(tmp_path / "ready", times=2)
    began = time.monotonic()
    assert ranks(f"open({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(60)", tmp_path) == 130
    assert time.monotonic() - began < 40  # the other sleeps for 60


def test_a_run_that_fails_while_it_stops_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path / "ready", number=signal.SIGTERM)
    code = f"open({str(tmp_path / 'ready')!r}, 'w')\n{UNTIL_STOPPED.replace('130', '7')}"
    options = TrainOptions(out=tmp_path / "run", nproc=1, max_restarts=3)
    assert restarting([sys.executable, "-c", RANK + code], options) == 7
    assert "starting again" not in capfd.readouterr().out


def test_a_failure_after_the_interrupt_is_still_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    interrupt(tmp_path / "ready")
    ready = f"open({str(tmp_path / 'ready')!r}, 'w')\n"
    code = f"if rank == 1: {UNTIL_STOPPED.replace('130', '7')}\ntime.sleep(60)"
    assert ranks(ready + code, tmp_path) == 7
    assert "rank 1 failed with exit code 7" in capfd.readouterr().err


def test_sigterm_stops_ranks_and_tells_them_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    interrupt(tmp_path / "ready", number=signal.SIGTERM)
    reads = UNTIL_STOPPED.replace("130", f"143 if os.read(int(os.environ['{STOP}']), 9) or rank else 7")
    ready = f"if rank: time.sleep(1)\nopen({str(tmp_path / 'ready')!r}, 'w')\n"
    assert ranks(ready + reads, tmp_path) == 143
    assert "or after 30 s, kills" in capfd.readouterr().err


def test_ranks_that_do_not_stop_in_time_after_sigterm_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_compiled.cli.launch.TERM_LIMIT", 0.3)
    interrupt(tmp_path / "ready", number=signal.SIGTERM)
    began = time.monotonic()
    assert ranks(f"open({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(60)", tmp_path) == 143
    assert time.monotonic() - began < 20


def test_ranks_that_were_stopped_by_a_signal_of_their_own_have_not_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ranks("sys.exit(143)", tmp_path) == 143
    assert "failed" not in capfd.readouterr().err


@pytest.mark.parametrize(("fails", "allowed", "starts", "code"), [(1, 2, 2, 0), (9, 2, 3, 5), (1, 0, 1, 5)])
def test_failed_ranks_are_started_again(tmp_path: Path, fails: int, allowed: int, starts: int, code: int) -> None:
    options = TrainOptions(nproc=2, out=tmp_path, max_restarts=allowed)
    work = (
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        f"open({str(tmp_path)!r} + f'/start-{{attempt}}-{{rank}}', 'w')\n"
        f"sys.exit(5 * (attempt < {fails} and rank == 1))"
    )
    assert restarting([sys.executable, "-c", RANK + work], options) == code
    assert len(list(tmp_path.glob("start-*-1"))) == starts
    assert len(list(tmp_path.glob("logs*"))) == starts


@pytest.mark.parametrize("code", [2, 143])
def test_what_no_restart_mends_is_not_started_again(tmp_path: Path, code: int) -> None:
    options = TrainOptions(nproc=1, out=tmp_path, max_restarts=3)
    assert restarting([sys.executable, "-c", f"import sys; sys.exit({code})"], options) == code
    assert [path.name for path in tmp_path.glob("logs*")] == ["logs"]


def test_only_the_first_failure_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURE, str(tmp_path / "failure.txt"))
    tell_failure(1, ValueError("a smaller --lr"))
    tell_failure(0, RuntimeError("lost a peer"))
    assert (tmp_path / "failure.txt").read_text() == "rank 1 failed: a smaller --lr\n"


def test_what_says_all_by_itself_is_told_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, kind in enumerate((ValueError, RankError, SaveError)):
        monkeypatch.setenv(FAILURE, str(tmp_path / f"{number}.txt"))
        try:
            raise kind("no room")
        except kind as error:
            tell_failure(1, error)
        assert (tmp_path / f"{number}.txt").read_text() == "rank 1 failed: no room\n"


def test_where_there_is_no_room_to_say_why_that_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks(f"open(os.environ['{FAILURE}'], 'w'); sys.exit(3)", tmp_path) == 3
    assert f"exit code 3, and why could not be written: is the disk of {tmp_path} full?" in capfd.readouterr().err


def test_an_unexpected_failure_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURE, str(tmp_path / "failure.txt"))
    try:
        raise RuntimeError("out of luck")
    except RuntimeError as error:
        tell_failure(0, error)
    told = (tmp_path / "failure.txt").read_text()
    assert "test_cli_launch.py" in told and told.endswith("RuntimeError: out of luck\n")
