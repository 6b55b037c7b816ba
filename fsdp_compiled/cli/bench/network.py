"""A slow network, simulated: gloo's collectives take as long as their bytes would on a wire of a given bandwidth.

    all_gather      issued ──┐                    ┌── done, however soon gloo itself was through
    reduce_scatter           │   issued ──┐       │
    the wire                 └ transfer ──┘└──────┴ transfer ──┐

A *transfer* starts when its collective is issued, or when the wire is free of the one before, and takes the latency
and its bytes over the bandwidth. Meanwhile the process goes on: who waits for the collective sleeps until the
transfer is over, and uses no processor for it. So compute that runs between issue and wait hides the transfer, as
it does on a real network, and nothing else does.

The operators below are what every collective of a process group is dispatched through: those of functional
collectives, of FSDP2 and of DDP's reducer alike. Inside `slow_network` their CPU kernels are wrapped. The bytes of a
transfer are those that a rank receives in a ring of W ranks: (W - 1) / W of the gathered buffer, the same of a
buffer that is reduced and scattered or exchanged, twice that of one that is all-reduced, all of one that is broadcast.
Barriers and point-to-point messages are left alone.
"""

import glob
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

# By operator: which of its arguments holds the whole buffers, and how often a ring sends (W - 1) / W of them.
RING: Mapping[str, tuple[int, int]] = {
    "_allgather_base_": (0, 1),
    "allgather_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_": (1, 1),
    "reduce_scatter_tensor_coalesced_": (1, 1),
    "alltoall_base_": (1, 1),
    "allreduce_": (0, 2),
    "allreduce_coalesced_": (0, 2),
}
PATIENCE = 1.0  # seconds for gloo's threads to be through with what they are at
KEPT = 4096  # transfers whose Python side is kept alive, because C++ may wait for one again


@dataclass
class _Seen:
    """Gloo's threads, when they were looked up."""

    tasks: int = 0
    until: float = 0.0
    gloo: list[str] = field(default_factory=list)


_seen = _Seen()


@dataclass
class Transfer:
    """One collective on the simulated wire; times in seconds of `time.monotonic`."""

    name: str  # the operator, without the underscores at its ends
    size: int  # bytes
    issued: float
    start: float
    end: float
    waited: float | None = None  # when somebody first waited for it

    @property
    def exposed(self) -> float:
        """For how long who waited had to, because of the wire."""
        return 0.0 if self.waited is None else max(0.0, self.end - self.waited)


class Network:
    """The wire of one process: what is on it, and how fast it is."""

    def __init__(self, bytes_per_second: float, latency: float, linger: float = 0.0) -> None:
        self.bytes_per_second, self.latency, self.linger = bytes_per_second, latency, linger
        self.transfers: list[Transfer] = []
        self._lock = threading.Lock()  # DDP issues from autograd's thread
        self._free = 0.0
        self._alive: deque[_Late] = deque(maxlen=KEPT)

    def seconds(self, size: int) -> float:
        """What a transfer of so many bytes takes on a free wire."""
        return self.latency + size / self.bytes_per_second

    def take(self) -> list[Transfer]:
        """The transfers since it was last called."""
        with self._lock:
            taken, self.transfers = self.transfers, []
        return taken

    def send(self, name: str, size: int, work: dist.Work, spared: bool) -> "_Late":
        with self._lock:
            issued = time.monotonic()
            start = issued if spared else max(issued, self._free)
            transfer = Transfer(name, size, issued, start, start if spared else start + self.seconds(size))
            late = _Late(work, transfer, self.linger)
            if not spared:
                self._free = transfer.end
                self.transfers.append(transfer)
            self._alive.append(late)
        return late


class _Late(dist._Work):
    """A collective's work that is over when gloo is through and the transfer has ended."""

    def __init__(self, work: dist.Work, transfer: Transfer, linger: float) -> None:
        super().__init__()
        self._work: dist.Work | None = work  # holds tensors, so only until it is over
        self._transfer, self._linger = transfer, linger

    @torch.compiler.disable  # here and below: DDP's reducer waits within a compiled region
    def wait(self, timeout: timedelta | None = None) -> bool:
        work, transfer = self._work, self._transfer
        if work is None:
            return True
        if transfer.waited is None:
            transfer.waited = time.monotonic()
        work.wait()
        time.sleep(max(self._linger, transfer.end - time.monotonic()))
        _settle()
        self._work = None
        return True

    @torch.compiler.disable
    def get_future(self) -> torch.futures.Future[Any]:
        assert self._work is not None
        inner, late = self._work.get_future(), torch.futures.Future[Any]()

        def finish() -> None:
            try:
                value = inner.wait()
                time.sleep(max(0.0, self._transfer.end - time.monotonic()))
                _settle()
                late.set_result(value)
            except Exception as error:
                late.set_exception(error)

        threading.Thread(target=finish, daemon=True).start()
        return late


def _settle() -> None:
    """Returns when each of gloo's threads has let go of the collective that it had finished (at once, but on Linux).

    If the last reference to a collective were a thread's, it would free the tensors while it holds gloo's queue, for
    which it needs the interpreter's lock; and the wrapped operators, unlike PyTorch's own, wait for the queue with that
    lock. A thread that is not yet through is running, or would be, were there a processor for it.
    """
    patience = time.monotonic() + PATIENCE
    while time.monotonic() < patience and any(_is_running(task) for task in _gloo_threads()):
        time.sleep(1e-4)


def _gloo_threads() -> list[str]:
    """Looked up anew where there are more threads or fewer, and now and then: a thread is named once it runs."""
    tasks, now = glob.glob("/proc/self/task/*"), time.monotonic()
    if len(tasks) != _seen.tasks or now > _seen.until:
        _seen.tasks, _seen.until, _seen.gloo = len(tasks), now + 0.5, [task for task in tasks if _is_gloos(task)]
    return _seen.gloo


def _is_gloos(task: str) -> bool:
    with suppress(OSError), open(f"{task}/comm") as name:
        return "gloo_runloop" in name.read()
    return False


def _is_running(task: str) -> bool:
    with suppress(OSError), open(f"{task}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "R"
    return False


@contextmanager
def slow_network(
    gigabits_per_second: float, latency: float = 0.0, linger: float = 0.0, spared: dist.ProcessGroup | None = None
) -> Iterator[Network]:
    """Inside, collectives on CPU tensors take as long as on such a network; ``latency`` in seconds.

    ``linger``: for how long at least gloo's own thread is left to let go of a collective that is over, before who
    waited for it lets go too: what the collective held is then freed by this thread, where a profiler sees it.
    ``spared``: a group whose collectives are not on the wire.
    """
    network = Network(gigabits_per_second * 1e9 / 8, latency, linger)
    exempt = spared.group_name if spared is not None else None
    with torch.library._scoped_library("c10d", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in (*RING, "broadcast_"):
            operator = getattr(torch.ops.c10d, name).default
            kernel = _wrap(name, torch.library.get_kernel(operator, "CPU"), network, exempt)
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
        yield network


def _wrap(name: str, kernel: Any, network: Network, exempt: str | None) -> Callable[..., Any]:
    @torch.compiler.disable
    def slow(keys: Any, *arguments: Any, **named: Any) -> Any:
        result = kernel.call_boxed(keys, *arguments, **named)
        group = dist.ProcessGroup.unbox(next(value for value in arguments if isinstance(value, torch.ScriptObject)))
        work = dist._Work.unbox(result[-1] if isinstance(result, tuple) else result)
        size, spared = _bytes(name, arguments, group.size()), group.group_name == exempt
        late = network.send(name.strip("_"), size, work, spared).boxed()
        return (*result[:-1], late) if isinstance(result, tuple) else late

    return slow


def _bytes(name: str, arguments: tuple[Any, ...], world: int) -> int:
    """What a rank receives; see the picture above."""
    position, times = RING.get(name, (0, 0))
    whole = sum(tensor.nbytes for tensor in pytree.tree_leaves(arguments[position]))
    return times * whole * (world - 1) // world if times else whole
