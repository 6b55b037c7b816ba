"""Two nodes, as two torchrun agents on this machine: one comes later, and is lost with its ranks; the other goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_compiled.cli import clock
from fsdp_compiled.runtime.checkpoint.folder import steps
from tests.launch import free_port

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
JOB = (
    "train --lower=eager --layers=1 --width=8 --heads=2 --context=8 --batch=2 --global-batch=4 --steps=100000 "
    "--save-every=20 --keep=2 --validate-every=100000"
)


def agent(folder: Path, port: int, host: bool, log: Path) -> subprocess.Popen[bytes]:
    rendezvous = f"is_host={int(host)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=nodes"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={rendezvous}"]
    command += ["--max-restarts=3", "-m", "fsdp_compiled", *JOB.split(), "--data", str(folder / "text.txt")]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--out", str(folder / "run"), "--checkpoint", str(folder / "saved")],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in with_children(int(child)))]


class Run:
    """What the run folder tells."""

    def __init__(self, folder: Path, first: subprocess.Popen[bytes], log: Path) -> None:
        self._file, self._first, self._log = folder / "run" / clock.FILE, first, log

    @property
    def lines(self) -> list[dict[str, Any]]:
        text = self._file.read_text() if self._file.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "began" in line]

    def wait(self, attempts: int, world: int) -> None:
        """Until the newest attempt is one of so many ranks, the run has had so many, and a checkpoint is complete."""
        until = time.monotonic() + 300
        while True:
            starts = self.starts
            if len(starts) >= attempts and starts[-1]["world"] == world:
                if self.lines[-1]["step"] > starts[-1]["step"] + 25:
                    return
            assert time.monotonic() < until and self._first.poll() is None, self._log.read_text()[-5000:]
            time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_node_is_taken_in_and_another_lost_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {line} of the text, which says little\n" for line in range(60)))
    logs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    port = free_port()
    agents = [agent(tmp_path, port, True, logs[0])]
    run = Run(tmp_path, agents[0], logs[0])
    try:
        run.wait(1, 1)
        agents.append(agent(tmp_path, port, False, logs[1]))
        run.wait(2, 2)
        for pid in with_children(agents[1].pid):
            os.kill(pid, signal.SIGKILL)
        run.wait(3, 1)
        agents[0].send_signal(signal.SIGTERM)
        assert agents[0].wait(100) != 0
    finally:
        for one in agents:
            if one.poll() is None:
                for pid in with_children(one.pid):
                    os.kill(pid, signal.SIGKILL)
            one.wait()
    said = logs[0].read_text()
    journal = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert journal == list(range(1, len(journal) + 1))
    assert [start["world"] for start in run.starts][-3:] == [1, 2, 1]
    assert all(start["step"] >= 20 and start["step"] % 20 == 0 for start in run.starts[-1:])
    assert run.lines[-1]["ended"] == "stopped" and steps(tmp_path / "saved")[-1] == len(journal)
    assert f"stopped after step {len(journal)}" in said and "gone" in said
