"""The process group: the device that it is on, what is asked of it, and how it ends."""

from __future__ import annotations

import logging
import os
import time
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compiled.distributed.mesh import Mesh

# Read when a communicator is made; whoever sets one decides.
NCCL = {"NCCL_GRAPH_REGISTER": "0", "TORCH_NCCL_HIGH_PRIORITY": "1"}
MOMENT = 0.05  # seconds in which a thread frees what it holds, on a machine however busy
log = logging.getLogger("fsdp_compiled")


def set_nccl() -> None:
    """Sets `NCCL` for communicators that are not made yet, and says so if the process group's own exists already.

    ``NCCL_GRAPH_REGISTER=0``: to register a graph's buffers, ranks exchange handles while they capture. If a rank's
    capture fails in Python, the others wait forever; and tiny collectives beside large registered ones may hang across
    nodes (NVIDIA/nccl 2389). Registration gains little for buffers as large as a unit's.

    ``TORCH_NCCL_HIGH_PRIORITY=1``: NCCL's kernels get multiprocessors before the compute that waits for them, as in
    FSDP2. PyTorch has another pool of streams for that priority (``initNCCLComm`` in ``ProcessGroupNCCL.cpp``), so no
    graph's stream is NCCL's.
    """
    group = dist.group.WORLD
    if group is None or not torch.cuda.is_available() or "nccl" not in str(dist.get_backend_config()):
        return
    backend: Any = group._get_backend(torch.device("cuda"))
    if not getattr(backend, "_is_initialized", lambda: True)():
        for name, value in NCCL.items():
            os.environ.setdefault(name, value)
    elif "TORCH_NCCL_HIGH_PRIORITY" not in os.environ:
        options = getattr(backend, "options", None)
        if not getattr(options, "is_high_priority_stream", True):
            _say_normal_priority()


@cache
def _say_normal_priority() -> None:
    log.warning(
        "NCCL's stream has normal priority, because the process group communicated before compile_sharded or "
        "fully_shard was called: collectives may wait for compute, and may share a CUDA graph's stream. Start with "
        "TORCH_NCCL_HIGH_PRIORITY=1 in the environment."
    )


def default_device() -> torch.device:
    """The GPU that the process group is bound to, else the one made current, else the one that torchrun says; the CPU
    where there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    group = dist.group.WORLD if dist.is_available() else None
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound
    current, local = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", 0))
    # If this process sees one GPU (CUDA_VISIBLE_DEVICES), its number is 0, whatever torchrun's number is.
    return torch.device("cuda", local if current == 0 and local < torch.cuda.device_count() else current)


def close() -> None:
    """Ends the process group, if there is one, and lets its threads let go.

    Gloo's threads end with the last reference to the group, and something may hold one (a ``DeviceMesh``, FSDP2's and
    DDP's modules). A thread that is still to free a collective's tensors needs the interpreter's lock. Python's
    shutdown would stop it in the middle, and it would take down a process that had done its work: ``terminate called
    without an active exception``. So here the lock is left to the threads for a moment.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(MOMENT)


_endings: list[Callable[[], None]] = []
_end: list[Callable[..., None]] = []  # PyTorch's own code to end a process group


def before_end(call: Callable[[], None]) -> None:
    """Has this called before a process group ends, whoever ends it.

    NCCL waits, however long it takes, until the graphs that hold its collectives are destroyed. PyTorch has no hook for
    this, and a script may end its process group while it still holds what it trained with. So the first request
    replaces the code of PyTorch's function: scripts hold the function itself (``from torch.distributed import
    destroy_process_group``), and another function under its name would not reach them.
    """
    if not _end:
        function = dist.destroy_process_group
        _end.append(types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__))
        try:
            function.__code__ = _destroy_process_group.__code__
        except ValueError:  # it is wrapped around others, and its code is bound to them
            dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = _destroy_process_group
    _endings.append(call)


def _destroy_process_group(group=None):  # type: ignore[no-untyped-def]
    # Runs as PyTorch's own function, with that module's names, so it imports what it needs.
    from fsdp_compiled.distributed import process_group

    process_group._end_graphs()
    process_group._end[0](group)


def _end_graphs() -> None:
    for ending in _endings:
        ending()


def backends(mesh: Mesh) -> dict[str, str]:
    """The backend that carries out collectives along each axis, on the mesh's device: ``"nccl"``, ``"gloo"``."""
    resolve = dist.distributed_c10d._resolve_process_group
    return {axis: resolve(name)._get_backend(mesh.device).name() for axis, name in mesh.groups.items()}


def timeout(mesh: Mesh) -> float:
    """Seconds that a rank waits for others in a collective, as the process group was started with."""
    group = dist.group.WORLD
    options = getattr(group._get_backend(mesh.device), "options", None) if group is not None else None
    found = getattr(options, "_timeout", None)
    return found.total_seconds() if found is not None else 1800.0
