"""Two nodes, as two torchrun agents on this machine; one is lost with its ranks, and the other goes on alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_compiled.cli import clock

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[1]
JOB = (
    "train --lower=eager --layers=1 --width=8 --heads=2 --context=8 --batch=2 --global-batch=4 --steps=400 "
    "--save-every=20 --keep=2 --validate-every=400"
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
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in with_children(int(child)))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_node_that_is_lost_is_gone_on_without(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(
        "".join(f"line {number} of the text, which says little\n" for number in range(60))
    )
    logs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    port = free_port()
    first, second = (agent(tmp_path, port, host, log) for host, log in zip((True, False), logs, strict=True))
    try:
        until = time.monotonic() + 200
        metrics = tmp_path / "run" / clock.FILE
        while True:  # both are in, and a checkpoint is complete
            lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
            starts = [line for line in lines if "began" in line]
            if starts and starts[-1]["world"] == 2 and lines[-1]["step"] > starts[-1]["step"] + 25:
                break
            assert time.monotonic() < until and first.poll() is None, logs[0].read_text()[-3000:]
            time.sleep(0.02)
        for pid in with_children(second.pid):
            os.kill(pid, signal.SIGKILL)
        assert first.wait(200) == 0, logs[0].read_text()[-5000:]
    finally:
        for one in (first, second):
            if one.poll() is None:
                for pid in with_children(one.pid):
                    os.kill(pid, signal.SIGKILL)
            one.wait()
    said = logs[0].read_text()
    journal = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert journal == list(range(1, 401))
    attempts = [json.loads(line) for line in metrics.read_text().splitlines() if "began" in line]
    worlds = [line["world"] for line in attempts if "began" in line]
    assert worlds[-2:] == [2, 1] and attempts[-1]["step"] >= 20 and "goes on after step" in said
    assert "gone" in said, said[-3000:]
