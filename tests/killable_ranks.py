"""Ranks as forks of this process, each of which may be killed: for tests of what happens then.

Meant for a process of its own that has imported torch and started no thread: a fork has all that at once, where a new
interpreter would need seconds.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed import TCPStore

from tests.forked_ranks import leave


class Forked:
    """``world`` ranks that run ``work(rank)``, with what they print in ``logs/rank<r>.txt``.

    The store at which they meet is in this process, as in torchrun's agent, until `end_store`; or ``on_rank_0``, as
    where a script is started by srun or mpirun.
    """

    def __init__(
        self,
        world: int,
        work: Callable[[int], int | None],
        logs: Path,
        environment: Mapping[str, str] | None = None,
        on_rank_0: bool = False,
    ) -> None:
        self.store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self.store.port
        if on_rank_0:
            self.end_store()
        self.logs = logs
        self.codes: list[int | None] = [None] * world  # as subprocess has them; None: still running
        logs.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": str(not on_rank_0),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            **(environment or {}),
        }
        self.pids = [self._fork(rank, shared, work) for rank in range(world)]

    def end_store(self) -> None:
        self.store = None

    def _fork(self, rank: int, environment: Mapping[str, str], work: Callable[[int], int | None]) -> int:
        if pid := os.fork():
            return pid
        leave(lambda: self._work(rank, environment, work))

    def _work(self, rank: int, environment: Mapping[str, str], work: Callable[[int], int | None]) -> int | None:
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        log = os.open(self.logs / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        atexit._clear()
        return work(rank)

    def poll(self) -> list[int | None]:
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return self.codes

    def wait(self, seconds: float, until: Callable[[list[int | None]], bool] = lambda codes: None not in codes) -> bool:
        """Until all have ended, or what is asked for; False if time ran out."""
        end = time.monotonic() + seconds
        while not until(self.poll()):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        for pid, code in zip(self.pids, self.poll(), strict=True):
            if code is None:
                os.kill(pid, signal.SIGKILL)
        self.wait(30)

    def said(self, rank: int) -> str:
        return (self.logs / f"rank{rank}.txt").read_text(errors="replace")
