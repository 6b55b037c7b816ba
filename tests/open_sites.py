"""Sites that come and go, each a job of `tests.workers.open_sites` that is told what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.launch import free_port

ROOT = Path(__file__).parent.parent
LONG = 120.0  # seconds, on a machine however busy


class Site:
    """A job of some ranks, and its answers. ``popen``: starts a process, as `subprocess.Popen` does."""

    def __init__(
        self, endpoint: str, seed: int, least: int, log: Path, ranks: int = 1, popen: Any = subprocess.Popen
    ) -> None:
        port, self.log = str(free_port()), log
        command = [sys.executable, "-P", "-m", "tests.workers.open_sites", endpoint, str(least), str(seed)]
        self.ranks = []
        for rank in range(ranks):
            answers = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            with log.open("a") as errors:
                self.ranks.append(
                    popen(
                        [*command, str(rank), str(ranks), port], stdin=subprocess.PIPE, stdout=answers, stderr=errors,
                        text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                    )
                )  # fmt: skip

    def begin(self, command: str, argument: Any = None) -> None:
        for one in self.ranks:
            assert one.stdin is not None
            one.stdin.write(json.dumps([command, argument]) + "\n")
            one.stdin.flush()

    def end(self) -> Any:
        assert self.ranks[0].stdout is not None
        line = self.ranks[0].stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)

    def do(self, command: str, argument: Any = None) -> Any:
        self.begin(command, argument)
        return self.end()

    def signal(self, which: int) -> None:
        for one in self.ranks:
            one.send_signal(which)

    def kill(self) -> None:
        for one in self.ranks:
            end(one)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait()


def all_do(sites: Sequence[Site], command: str, argument: Any = None) -> list[Any]:
    for one in sites:
        one.begin(command, argument)
    return [one.end() for one in sites]
