"""One rank of a run: which it is, how ranks agree to stop, and how the first failure is reported.

The launcher (launch.py) starts a rank with three facts in its environment. `STOP` is the number of a pipe's
reading end: once the launcher closes the other end, or dies, the pipe is readable and the rank should stop; a byte in
it says that the launcher was asked by SIGTERM. `FAILURE` is a path: the first rank to fail writes its reason there, so
that the ranks which lose it as a peer do not hide it. `BEGAN` is when the command began. Under torchrun none is set,
and signals ask for the stop.
"""

import fcntl
import os
import select
import signal
import struct
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.runtime.checkpoint.writing import SaveError

T = TypeVar("T")

STOP = "FSDP_COMPILED_STOP"
FAILURE = "FSDP_COMPILED_FAILURE"
BEGAN = "FSDP_COMPILED_BEGAN"
STOPPED = {number: 128 + number for number in (signal.SIGINT, signal.SIGTERM)}  # exit codes of ranks that were asked to
SAME = 1.0  # seconds in which two signals are one request: some systems signal torchrun and its ranks alike
PATIENCE = 1.0  # seconds between two looks at what is asked, before there is a process group


@dataclass(frozen=True)
class RankInfo:
    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


def under_launcher() -> bool:
    """Whether a launcher, ours or torchrun, has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def own_launcher() -> bool:
    return STOP in os.environ


def place() -> RankInfo:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)


def began() -> float:
    """When the command that this rank is part of began, in seconds since the epoch."""
    return float(os.environ.get(BEGAN, time.time()))


class Ranks:
    """Small facts agreed between hosts, on a gloo group of its own: the program's collectives never wait for
    them, and on a GPU no host waits for its device. Made once the process group is there."""

    def __init__(self, why: Callable[[Exception], str | None] = lambda error: None) -> None:
        """``why``: who is to blame for a collective that failed with this error, if it is known."""
        many = dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if many else None
        self._why = why

    def exchange(self, value: T) -> list[T]:
        """What each rank has, by rank; any picklable value."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        with self.naming():
            dist.all_gather_object(found, value, self.group)
        return found

    @contextmanager
    def naming(self) -> Iterator[None]:
        """If a collective fails because a rank is gone, lets the error say which."""
        try:
            yield
        except RuntimeError as error:
            if (reason := self._why(error)) is not None:
                raise RankError(reason) from error
            raise


class Stop:
    """A request to stop, which every rank follows after the same step.

    It comes by SIGINT (Ctrl-C) or SIGTERM (the machine is wanted back), to the launcher, to torchrun or to any rank; or
    because the launcher is gone. A second one ends this process at once.
    """

    def __init__(self) -> None:
        self._pipe = int(os.environ[STOP]) if own_launcher() else None
        self._parent = os.getppid()
        self._signal = 0
        self._when = 0.0
        self._answer: tuple[Tensor, dist.Work | None] | None = None
        for number in STOPPED:
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal and now - self._when > SAME:
            os._exit(STOPPED[signal.Signals(number)])
        if not self._signal:
            self._when = now
        self._signal = max(self._signal, number)

    @property
    def asked(self) -> int:
        """The signal that asked this rank, 0 if none did; the others may not know yet."""
        if self._pipe is not None and select.select([self._pipe], [], [], 0)[0]:
            (unread,) = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0" * 4))
            return max(self._signal, signal.SIGTERM if unread else signal.SIGINT)
        if self._pipe is None and os.getppid() != self._parent:  # nobody is left who would start this rank again
            return signal.SIGTERM
        return self._signal

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Inside, until there is a process group, a request ends this process at once: it may be waiting for ranks, or
        for a store, that are gone, which takes PyTorch half an hour to see."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(PATIENCE) and not dist.is_initialized():
                if number := self.asked:
                    os._exit(STOPPED[signal.Signals(number)])

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def agreed(self, ranks: Ranks) -> int:
        """The signal by which all ranks stop now, else 0. Every rank calls it after every step. The answer is from the
        call before, whose reduction ran during the step, so no step waits for it."""
        before, self._answer = self._answer, self._question(ranks)
        if before is None:
            return 0
        flag, work = before
        if work is not None:
            with ranks.naming():
                work.wait()
        return int(flag.item())

    def _question(self, ranks: Ranks) -> tuple[Tensor, dist.Work | None]:
        flag = torch.tensor([self.asked])
        if ranks.group is None:
            return flag, None
        with ranks.naming():
            return flag, dist.all_reduce(flag, dist.ReduceOp.MAX, ranks.group, async_op=True)


def tell_failure(rank: int, error: BaseException) -> None:
    """Writes why this rank failed, unless another rank failed before it."""
    if FAILURE not in os.environ:
        return
    # These errors say all, and what to do; any other needs the place it came from.
    plain = isinstance(error, ValueError | RankError | SaveError)
    reason = f": {error}" if plain else ":\n" + "".join(traceback.format_exception(error)).rstrip()
    # It exists, or the disk is full, which must not hide the error.
    with suppress(OSError), Path(os.environ[FAILURE]).open("x") as file:
        file.write(f"rank {rank} failed{reason}\n")
