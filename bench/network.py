"""A slow network, simulated: gloo's collectives take as long as their bytes would on a wire of a given bandwidth.

    all_gather      issued ──┐                    ┌── done, however soon gloo itself was through
    reduce_scatter           │   issued ──┐       │
    the wire                 └ transfer ──┘└──────┴ transfer ──┐

A *transfer* starts when its collective is issued, or when the wire is free of the one before, and takes the latency
and its bytes over the bandwidth. Meanwhile the process goes on: who waits for the collective sleeps until the
transfer is over, and uses no processor for it. So compute that runs between issue and wait hides the transfer, as
it does on a real network, and nothing else does.

The operators below are what every collective of a process group is dispatched through: those of functional
collectives, of FSDP2 and of DDP's reducer alike. Inside `slow_network` they come by here on their way to gloo. The
bytes of a transfer are those that a rank receives in a ring of W ranks: (W - 1) / W of the gathered buffer, the same of
a buffer that is reduced and scattered or exchanged, twice that of one that is all-reduced, all of one that is
broadcast. Barriers and point-to-point messages are left alone.

With `Inner`, ranks are in nodes, neighbours together: groups whose ranks are all in one node have a wire of their own,
which is as fast as said, and all others the network's.

Relies on ``torch.library._scoped_library``, in torch 2.11 to 2.14, to put the operators that wait in gloo's place.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
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
BEFORE = DispatchKey.ADInplaceOrView  # where operators pass on their way to a device's kernel
KEPT = 4096  # transfers whose Python side is kept alive, because C++ may wait for one again


@dataclass(frozen=True)
class Inner:
    """The wire inside of a node of so many ranks."""

    gigabits_per_second: float
    ranks: int

    def holds(self, ranks: Sequence[int]) -> bool:
        """Whether all of these are in one node."""
        return len({rank // self.ranks for rank in ranks}) == 1


@dataclass
class Transfer:
    """One collective on the simulated wire; times in seconds of `time.monotonic`."""

    name: str  # the operator, without the underscores at its ends
    size: int  # bytes
    issued: float
    start: float
    end: float
    waited: float | None = None  # when somebody first waited for it
    inner: bool = False  # whether it was on the wire inside of a node

    @property
    def exposed(self) -> float:
        """For how long who waited had to, because of the wire."""
        return 0.0 if self.waited is None else max(0.0, self.end - self.waited)


class Network:
    """The wires of one process: what is on them, and how fast they are."""

    def __init__(
        self, bytes_per_second: float, latency: float, linger: float = 0.0, inner: Inner | None = None
    ) -> None:
        self.bytes_per_second, self.latency, self.linger, self.inner = bytes_per_second, latency, linger, inner
        self.transfers: list[Transfer] = []
        self._lock = threading.Lock()  # DDP issues from autograd's thread
        self._free = {False: 0.0, True: 0.0}  # when each wire is: the network's, and that inside of a node
        self._alive: deque[_Late] = deque(maxlen=KEPT)

    def seconds(self, size: int, inside: bool = False) -> float:
        """What a transfer of so many bytes takes on a free wire."""
        if inside and self.inner is not None:
            return self.latency + size / (self.inner.gigabits_per_second * 1e9 / 8)
        return self.latency + size / self.bytes_per_second

    def take(self) -> list[Transfer]:
        """The transfers since it was last called."""
        with self._lock:
            taken, self.transfers = self.transfers, []
        return taken

    def send(self, name: str, size: int, work: dist.Work, ranks: Sequence[int]) -> "_Late":
        """Of a collective among these ranks."""
        inside = self.inner is not None and self.inner.holds(ranks)
        with self._lock:
            issued = time.monotonic()
            start = max(issued, self._free[inside])
            self._free[inside] = end = start + self.seconds(size, inside)
            transfer = Transfer(name, size, issued, start, end, inner=inside)
            late = _Late(work, transfer, self.linger)
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
                late.set_result(value)
            except Exception as error:
                late.set_exception(error)

        threading.Thread(target=finish, daemon=True).start()
        return late


@contextmanager
def slow_network(
    gigabits_per_second: float,
    latency: float = 0.0,
    linger: float = 0.0,
    spared: dist.ProcessGroup | None = None,
    inner: Inner | None = None,
) -> Iterator[Network]:
    """Inside, collectives on CPU tensors take as long as on such a network; ``latency`` in seconds.

    ``linger``: for how long at least gloo's own thread is left to let go of a collective that is over, before who
    waited for it lets go too: what the collective held is then freed by this thread, where a profiler sees it.
    ``spared``: a group whose collectives are not on the wire. ``inner``: the wire inside of nodes.
    """
    network = Network(gigabits_per_second * 1e9 / 8, latency, linger, inner)
    exempt = spared.group_name if spared is not None else None
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in (*RING, "broadcast_"):
            library.impl(name, _wrap(name, network, exempt), BEFORE.name)
        yield network


def _wrap(name: str, network: Network, exempt: str | None) -> Callable[..., Any]:
    """The operator goes on to gloo without the interpreter's lock, as all calls of operators do.

    With it, it would wait for gloo's queue for ever, where gloo's thread lets go of a collective that nobody else holds
    any more: to free its tensors that thread needs the interpreter, and does so while it holds the queue.
    """
    operator = getattr(torch.ops.c10d, name).default

    @torch.compiler.disable
    def slow(*arguments: Any, **named: Any) -> Any:
        with _ExcludeDispatchKeyGuard(DispatchKeySet(BEFORE)):
            result = operator(*arguments, **named)
        group = dist.ProcessGroup.unbox(next(value for value in arguments if isinstance(value, torch.ScriptObject)))
        if group.group_name == exempt:
            return result
        work = dist._Work.unbox(result[-1] if isinstance(result, tuple) else result)
        size, ranks = _bytes(name, arguments, group), dist.get_process_group_ranks(group)
        late = network.send(name.strip("_"), size, work, ranks).boxed()
        return (*result[:-1], late) if isinstance(result, tuple) else late

    return slow


def _bytes(name: str, arguments: tuple[Any, ...], group: dist.ProcessGroup) -> int:
    """What a rank receives; see the picture above."""
    if name == "alltoall_base_" and arguments[3]:  # rows of each rank in what is received
        received, rows = arguments[0], arguments[3]
        return received.nbytes * (sum(rows) - rows[group.rank()]) // max(sum(rows), 1)  # type: ignore[no-any-return]
    position, times = RING.get(name, (0, 0))
    whole = sum(tensor.nbytes for tensor in pytree.tree_leaves(arguments[position]))
    return times * whole * (group.size() - 1) // group.size() if times else whole
