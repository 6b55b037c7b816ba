"""Ranks as forks of the launcher: what all of them import is imported once, and what a machine is asked once is asked
meanwhile.

    launcher    torch, the package, what Inductor imports late | ranks
    a fork           trials of the compiler .......................
    ranks                                                          | step 1

Importing takes 2 s of one processor, which each rank would take anew, after the launcher. Only on Linux, without GPUs
(CUDA does not survive a fork), and while the launcher has one thread; else ranks are started as new processes.
A fork has what a new process would have: a session, an environment, signals and descriptors of its own, and PyTorch was
imported with the number of threads that a rank has. It ends as Python ends, but that it frees nothing.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from fsdp_compiled.cli.toolchain import choose_lower

THREADS = "OMP_NUM_THREADS"  # PyTorch, MKL and OpenBLAS read it when they are imported
BEGAN = time.time()  # this command, before it imports PyTorch
Work = Callable[[], int]
_ready_for: int | None = None  # how many ranks


def threads(world: int) -> str:
    """Of a rank where the user did not say how many: its part of the cores."""
    return str(max(1, (os.cpu_count() or 1) // world))


def prepare(world: int, lower: str | None) -> None:
    """Imports what so many ranks need, where they can be forked from this process; the first to import PyTorch."""
    global _ready_for
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    with_given = THREADS in os.environ
    os.environ.setdefault(THREADS, threads(world))
    gc.disable()  # all of it stays
    try:
        import torch

        if torch.cuda.device_count():
            if not with_given:
                del os.environ[THREADS]  # as many ranks as GPUs, which are new processes
            return
        if (lower or choose_lower(cuda=False)[0]) == "inductor":
            from fsdp_compiled.lower import warm_up

            warm_up.before_forks()
        import fsdp_compiled.cli.train  # noqa: F401

        _ready_for = world
        gc.freeze()  # nor do ranks look through it
    finally:
        gc.enable()


def possible(world: int) -> bool:
    return _ready_for == world and threading.active_count() == 1


class Forked:
    """A rank that does this work; what `subprocess.Popen` is for a command."""

    def __init__(
        self, work: Work, environment: Mapping[str, str], stdout: int | None, stderr: int, close: Sequence[int]
    ) -> None:
        """``close``: descriptors that are the launcher's alone."""
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        started, ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            leave(partial(_work, work, environment, stdout, stderr, [*close, started, ready]))
        os.close(ready)
        os.read(started, 1)  # its end: from here on the rank has a session to be killed by
        os.close(started)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int | None:
        return self._ended(0)

    def _ended(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _work(work: Work, environment: Mapping[str, str], stdout: int | None, stderr: int, close: Sequence[int]) -> int:
    """As the rank, which this process becomes."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if stdout is not None:
        os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in close:
        os.close(descriptor)
    return work()


def leave(work: Callable[[], Any]) -> NoReturn:
    """Ends this process after ``work``, whose number is the exit status, as Python would, but that it frees nothing."""
    code = 1
    try:
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined] # ends executors and waits for threads, as at Python's end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
