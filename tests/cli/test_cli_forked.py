"""Ranks that are forks of the launcher: what they have of it, what they do not, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_compiled.cli import forked
from fsdp_compiled.lower import warm_up
from fsdp_compiled.lower.inductor import PIECES

ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-P", str(ROOT / "tests" / "workers" / "forked_launcher.py")]
NEW = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}


def test_ranks_share_imports_and_nothing_else_and_are_started_again(tmp_path: Path) -> None:
    done = subprocess.run([*LAUNCHER, str(tmp_path), "ends"], env=NEW, capture_output=True, text=True, timeout=100)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "code": 0,
        "possible": [True, False],
        "ended": [-signal.SIGKILL, 1, 7],
        "folder": True,
    }, done.stderr
    assert done.stdout.count("said") == 2 and "rank 1 failed with exit code 1" in done.stderr  # rank 0's, twice
    assert (tmp_path / "logs-1" / "rank1.txt").read_text().count("RuntimeError: no luck") == 1
    assert (tmp_path / "logs" / "rank1.txt").read_text() == "said\n"
    for attempt in (0, 1):
        for rank in (0, 1):
            assert json.loads((tmp_path / f"found-{attempt}-{rank}").read_text()) == {
                "imported by": True,
                "session": True,
                "place": ["2", str(rank)],
                "threads": True,
                "input": "",
                "signals": ["default_int_handler"],
                "collects": True,
                "stopping": False,
            }


def test_ranks_whose_launcher_is_killed_stop(tmp_path: Path) -> None:
    launcher = subprocess.Popen([*LAUNCHER, str(tmp_path), "killed"], env=NEW, stdout=subprocess.DEVNULL)
    began = [tmp_path / f"began-0-{rank}" for rank in (0, 1)]
    wait(lambda: all(path.exists() and path.read_text() for path in began))
    launcher.kill()
    launcher.wait()
    told = [tmp_path / f"stopping-0-{rank}" for rank in (0, 1)]
    wait(lambda: all(path.exists() and path.read_text() for path in told))
    assert [path.read_text() for path in told] == ["true", "true"]
    wait(lambda: not any(alive(int(path.read_text())) for path in began))


def wait(until: object) -> None:
    deadline = time.monotonic() + 50
    while not until():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_has_torch_already_or_a_thread_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    forked.prepare(2, "eager")  # this process has imported torch, with another number of threads
    assert not forked.possible(2) and dict(os.environ) == before
    monkeypatch.setattr(forked, "_ready_for", 2)
    monkeypatch.setattr("threading.active_count", lambda: 1)
    assert forked.possible(2) and not forked.possible(4)
    monkeypatch.setattr("threading.active_count", lambda: 2)
    assert not forked.possible(2)


def test_the_compiler_is_tried_once_beside_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm_up, "_elsewhere", False)
    monkeypatch.setattr(warm_up, "_compile", lambda: (tmp_path / "tried").write_text(str(os.getpid())))
    monkeypatch.setattr(warm_up, "compile_product", lambda: (tmp_path / "product").write_text(str(os.getpid())))
    warm_up.before_forks()
    assert (tmp_path / "product").read_text() == str(os.getpid())
    wait((tmp_path / "tried").exists)
    assert warm_up.begin.__wrapped__() is None  # in the launcher's forks
    assert int((tmp_path / "tried").read_text() or 0) != os.getpid()
    (tmp_path / "product").unlink()
    (tmp_path / "fsdp_compiled" / PIECES).mkdir(parents=True)  # something was compiled already
    warm_up.before_forks()
    assert not (tmp_path / "product").exists()
