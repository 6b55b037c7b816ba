"""The ranks: process groups along each axis, their start and end, and agreement between ranks.

This is the only file that starts, asks or ends a process group.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compiled.distributed import rendezvous
from fsdp_compiled.distributed.gloo_gathers import gather_into_given

REGISTER = ("NCCL_GRAPH_REGISTER", "0")
# What the axes of a ``DeviceMesh`` are called here: by our names, and by torchtitan's.
AXES = {
    "replicate": "replicate", "dp_replicate": "replicate", "shard": "shard", "dp_shard": "shard", "fsdp": "shard",
    "tp": "tp",
}  # fmt: skip
SETTLED = 0.05  # seconds in which a thread frees what it holds, on a machine however busy


class RankError(RuntimeError):
    """Ranks disagree, or one of them failed; raised on every rank."""


class Unanimous(ValueError):
    """Raised by every rank in the same place: nobody needs to be told."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place. ``groups`` names the process group along each axis that has more than one rank.

    Ranks along ``tp`` see the same batch and hold parts of the same parameters; ``tp_mesh`` is that axis of the
    ``DeviceMesh``, on which the parameters that were cut are DTensors. None: the mesh has no such axis. ``given``: the
    ``DeviceMesh`` that it was made of, if one was.
    """

    device: torch.device
    shard: int = 1
    replicate: int = 1
    shard_rank: int = 0
    rank: int = 0
    groups: Mapping[str, str] = field(default_factory=dict)
    tp: int = 1
    tp_rank: int = 0
    replicate_rank: int = 0
    tp_mesh: DeviceMesh | None = None
    given: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.groups and self.device.type == "cpu":
            gather_into_given()

    @property
    def row(self) -> int:
        """This rank's place among those with batches of their own."""
        return self.replicate_rank * self.shard + self.shard_rank

    @property
    def world(self) -> int:
        """All ranks."""
        return self.shard * self.replicate * self.tp


def connect(mesh: DeviceMesh | None, device: torch.device | None = None) -> Mesh:
    """This rank's `Mesh`: from a ``DeviceMesh``, or all ranks there are.

    Without a mesh, a process group that runs already is used; under ``torchrun`` (``RANK`` and ``WORLD_SIZE`` in the
    environment) one is started, nccl on GPUs and gloo on CPUs, and closed when Python exits; else the world is one.
    On GPUs the rank's own becomes the current device, for a process group that runs already too: what ranks exchange
    as Python objects goes through it.
    """
    if device is not None and device.type == "meta":
        device = None
    if mesh is not None:
        _without_registration()
        return _from_device_mesh(mesh)
    if not dist.is_available():
        return Mesh(device or _default_device())
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        device = _default_device()
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = {}
        if rendezvous.outlives_restarts():
            store = {"store": rendezvous.own_store(rank, world), "rank": rank, "world_size": world}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            os.environ.setdefault(*REGISTER)
            # Connects now, and knows its GPU in every call.
            dist.init_process_group("nccl", device_id=device, **store)
        else:
            dist.init_process_group("gloo", **store)
        atexit.register(close)
    if not dist.is_initialized():
        return Mesh(device or _default_device())
    device = device or _default_device()
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        _without_registration()
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    groups = {"shard": group.group_name} if world > 1 else {}
    return Mesh(device, world, 1, rank, rank, groups)


def _without_registration() -> None:
    """Switches NCCL's registration of graphs' buffers off, if its communicator is not made yet, when that is read.

    To register, ranks exchange handles while they capture: a rank whose capture fails in Python leaves the others
    waiting for ever; and tiny collectives beside large registered ones may hang across nodes (NVIDIA/nccl 2389). It
    gains little for buffers as large as a unit's. Whoever sets ``NCCL_GRAPH_REGISTER`` decides.
    """
    group = dist.group.WORLD
    if group is None or not torch.cuda.is_available() or "nccl" not in str(dist.get_backend_config()):
        return
    initialized = getattr(group._get_backend(torch.device("cuda")), "_is_initialized", lambda: True)
    if not initialized():
        os.environ.setdefault(*REGISTER)


def _default_device() -> torch.device:
    """The GPU that the process group is bound to, that was made current, or that torchrun says, in this order."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    group = dist.group.WORLD if dist.is_available() else None
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound
    current, local = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", 0))
    # Of one GPU that this process sees (CUDA_VISIBLE_DEVICES), the number is 0, whatever torchrun's is.
    return torch.device("cuda", local if current == 0 and local < torch.cuda.device_count() else current)


def close() -> None:
    """Ends the process group, if there is one, and lets its threads let go.

    gloo's threads end with the last reference to the group, and something may hold one (a ``DeviceMesh``, FSDP2's and
    DDP's modules). A thread that is still about to free a collective's tensors, for which it needs the interpreter's
    lock, would be stopped by Python's shutdown in the middle, and take a process that had done its work down with it:
    ``terminate called without an active exception``. Here the lock is left to them for a moment.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(SETTLED)


_endings: list[Callable[[], None]] = []
_end: list[Callable[..., None]] = []  # PyTorch's own code to end a process group


def before_end(call: Callable[[], None]) -> None:
    """Has this called before a process group ends, whoever ends it.

    NCCL waits, however long it takes, for the graphs that hold its collectives to be destroyed; PyTorch has no place to
    say so, and a script may end its process group while it still holds what it trained with. So once something asks
    for it, the function has other code: scripts hold the function itself (``from torch.distributed import
    destroy_process_group``), and a name of another function would not reach them.
    """
    if not _end:
        function = dist.destroy_process_group
        _end.append(_copied(function))
        try:
            function.__code__ = _destroy_process_group.__code__
        except ValueError:  # it is wrapped around others, and its code is bound to them
            dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = _destroy_process_group
    _endings.append(call)


def _copied(function: Any) -> Callable[..., None]:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _destroy_process_group(group=None):  # type: ignore[no-untyped-def]
    # Runs as PyTorch's own function, among its names: what it needs it imports.
    from fsdp_compiled.distributed import mesh

    mesh._end_graphs()
    mesh._end[0](group)


def _end_graphs() -> None:
    for ending in _endings:
        ending()


def backends(mesh: Mesh) -> dict[str, str]:
    """Who carries out collectives along each axis, for tensors on the mesh's device: ``"nccl"``, ``"gloo"``."""
    resolve = dist.distributed_c10d._resolve_process_group
    return {axis: resolve(name)._get_backend(mesh.device).name() for axis, name in mesh.groups.items()}


def timeout(mesh: Mesh) -> float:
    """Seconds that a rank waits for others in a collective, as the process group was started with."""
    group = dist.group.WORLD
    options = getattr(group._get_backend(mesh.device), "options", None) if group is not None else None
    found = getattr(options, "_timeout", None)
    return found.total_seconds() if found is not None else 1800.0


def _from_device_mesh(mesh: DeviceMesh) -> Mesh:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh from "
            "torch.distributed.device_mesh.init_device_mesh."
        )
    axes = _axes_of(mesh)
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh holds {mesh.size()} ranks, but the world has {dist.get_world_size()}; every rank must be in the "
            "mesh."
        )
    place = mesh.get_coordinate()
    assert place is not None
    sizes = {axis: mesh.size(index) for axis, index in axes.items()}
    groups = {axis: mesh.get_group(index).group_name for axis, index in axes.items() if sizes[axis] > 1 or axis == "tp"}
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = _default_device()
        torch.cuda.set_device(device)
    return Mesh(
        device,
        sizes.get("shard", 1),
        sizes.get("replicate", 1),
        place[axes["shard"]] if "shard" in axes else 0,
        dist.get_rank(),
        groups,
        sizes.get("tp", 1),
        place[axes["tp"]] if "tp" in axes else 0,
        place[axes["replicate"]] if "replicate" in axes else 0,
        None if "tp" not in axes else mesh if mesh.ndim == 1 else mesh["tp"],
        given=mesh,
    )


def device_mesh_of_all() -> DeviceMesh:
    """All ranks on one axis; under ``torchrun`` the process group is started, and without, one of a world of one."""
    place = connect(None)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(close)
    return init_device_mesh(place.device.type, (dist.get_world_size(),))


def tp_beside(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis named "tp" of the mesh that this one is a part of, if it has one besides.

    Relies, in torch 2.11 to 2.14, on ``DeviceMesh._get_root_mesh``.
    """
    root = mesh._get_root_mesh()
    if root is mesh or "tp" not in (root.mesh_dim_names or ()) or "tp" in (mesh.mesh_dim_names or ()):
        return None
    return root["tp"]


def beside(mesh: DeviceMesh, tp: DeviceMesh) -> DeviceMesh:
    """The axes of both, those of ``mesh`` first; as FSDP2 has it, by ``DeviceMesh._concatenate``."""
    return DeviceMesh._concatenate([mesh, tp])


def place_in(mesh: DeviceMesh, tp: DeviceMesh | None = None) -> Mesh:
    """This rank's place in a mesh whose only axis shards, or whose first replicates and second shards, by any name.

    ``tp``: an axis beside it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh from "
            "torch.distributed.device_mesh.init_device_mesh."
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.size() * (tp.size() if tp is not None else 1) != dist.get_world_size():
        raise NotImplementedError(
            f"mesh holds {mesh.size()} ranks{f', beside {tp.size()} along tp' if tp is not None else ''}, but the "
            f"world has {dist.get_world_size()}; fsdp_compiled.fully_shard needs every rank in the mesh, or in it and "
            'a tp axis: mesh["dp"] and mesh["tp"] of one mesh. Start as many processes as that holds.'
        )
    if tp is not None and set(mesh.mesh.flatten().tolist()) & set(tp.mesh.tolist()) != {dist.get_rank()}:
        raise ValueError(
            f"mesh holds ranks {mesh.mesh.flatten().tolist()} here and the tp axis {tp.mesh.tolist()}: expected two "
            'axes of one mesh, mesh["dp"] for fully_shard and mesh["tp"] for parallelize_module.'
        )
    _without_registration()
    axes = {"shard": mesh.ndim - 1} | ({"replicate": 0} if mesh.ndim == 2 else {})
    sizes = {axis: mesh.size(dim) for axis, dim in axes.items()}
    groups = {axis: mesh.get_group(dim).group_name for axis, dim in axes.items() if sizes[axis] > 1}
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = _default_device()
        torch.cuda.set_device(device)
    rank = mesh.get_local_rank(axes["shard"])
    if tp is None:
        return Mesh(device, sizes["shard"], sizes.get("replicate", 1), rank, dist.get_rank(), groups)
    groups["tp"] = tp.get_group().group_name
    replica = mesh.get_local_rank(axes["replicate"]) if "replicate" in axes else 0
    return Mesh(
        device, sizes["shard"], sizes.get("replicate", 1), rank, dist.get_rank(), groups, tp.size(),
        tp.get_local_rank(), replica, tp,
    )  # fmt: skip


def _axes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Which dimension of the mesh each of our axes is."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return {"tp" if names == ("tp",) else "shard": 0}
    found: dict[str, int] = {}
    for index, name in enumerate(names):
        axis = AXES.get(name)
        if axis is None and mesh.size(index) == 1:
            continue  # one rank along it: there is nothing to do
        if axis is None or axis in found:
            found = {}
            break
        found[axis] = index
    if not found:
        raise ValueError(
            f'mesh has axes {names or mesh.ndim}; expected one axis, which shards, or two named ("replicate", "shard"),'
            ' and for tensor parallelism one named "tp" besides. torchtitan\'s names (dp_replicate, dp_shard or fsdp, '
            "tp) mean the same."
            + (
                ' Context parallelism has no axis of its own: ranks along "shard" or "replicate" have stretches of '
                "their sequences (SequenceAttention, docs/context_parallel.md)."
                if "cp" in names
                else ""
            )
        )
    return found


def broadcast(tensor: torch.Tensor, mesh: Mesh, parts: bool = False) -> None:
    """Rank 0's values, in place on every rank. ``parts``: each rank along ``tp`` has a part of its own.

    Then the values are those of the first rank with the same place along ``tp``.
    """
    if mesh.world == 1 or not tensor.numel():
        return
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if mesh.tp == 1:
        dist.broadcast(tensor, 0)
        return
    for axis in ("replicate", "shard") if parts else ("replicate", "shard", "tp"):
        if axis in mesh.groups:
            dist.broadcast(tensor, group=dist.distributed_c10d._resolve_process_group(mesh.groups[axis]), group_src=0)


def gather_parts(part: torch.Tensor, mesh: Mesh) -> list[torch.Tensor]:
    """What each rank along ``tp`` has, all of one shape, by its place there."""
    if mesh.tp == 1:
        return [part]
    collectives = torch.ops._c10d_functional
    whole = collectives.all_gather_into_tensor(part.reshape(-1), mesh.tp, mesh.groups["tp"])
    return [one.view(part.shape) for one in collectives.wait_tensor(whole).chunk(mesh.tp)]


def gather_shards(shard: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """``[n]`` on each rank -> ``[shard * n]``, the whole buffer, on every rank."""
    if mesh.shard == 1:
        return shard
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_gather_into_tensor(shard, mesh.shard, mesh.groups["shard"]))


def exchange(value: Any, mesh: Mesh) -> list[Any]:
    """What each rank has, on every rank, by rank; any picklable value."""
    if mesh.world == 1:
        return [value]
    found: list[Any] = [None] * mesh.world
    dist.all_gather_object(found, value)
    return found


def exchange_along_tp(value: Any, mesh: Mesh) -> list[Any]:
    """What each rank along the tp axis has, by place there; any picklable value."""
    if mesh.tp == 1:
        return [value]
    found: list[Any] = [None] * mesh.tp
    dist.all_gather_object(found, value, group=dist.distributed_c10d._resolve_process_group(mesh.groups["tp"]))
    return found


def among(value: Any, mesh: Mesh) -> tuple[int, int]:
    """This rank's place among the ranks that have an equal value, and how many they are."""
    values = exchange(value, mesh)
    return values[: mesh.rank].count(value), values.count(value)


def agree(
    mesh: Mesh,
    what: str,
    text: str,
    failure: BaseException | None = None,
    own: Callable[[], str] | None = None,
    value: Any = None,
) -> list[Any]:
    """Every rank shows its text; where they differ, or a rank failed, every rank raises. Returns each rank's value.

    The rank that failed raises its own exception, the others a `RankError` that quotes it. Where texts differ, the
    first differing line is shown with the ranks that have it. ``own``: more text, which ranks with the same place
    along ``tp`` have in common.
    """
    if mesh.world == 1:
        if failure is not None:
            raise failure
        return [value]
    texts = (text, own() if own is not None and failure is None else "")
    digests = [hashlib.sha256(one.encode()).hexdigest() for one in texts]
    error = f"{type(failure).__name__}: {failure}" if failure is not None else None
    found = exchange((error, mesh.tp_rank, *digests, value), mesh)
    if failure is not None:
        raise failure
    for rank, (other, *_) in enumerate(found):
        if other is not None:
            raise RankError(f"rank {rank} failed, so no rank goes on. It said:\n{other}")
    first: dict[int, int] = {}  # by place along tp, the first rank there
    for rank, (_, place, *_) in enumerate(found):
        first.setdefault(place, rank)
    for which, one in enumerate(texts, 2):
        for rank, row in enumerate(found):
            base = 0 if which == 2 else first[row[1]]
            if row[which] != found[base][which]:
                both = exchange(one if mesh.rank in (base, rank) else "", mesh)
                difference = _difference(both[base], both[rank], base, rank)
                raise RankError(f"{what} differs between rank {base} and rank {rank}.\n{difference}")
    return [row[-1] for row in found]


def _difference(first: str, other: str, base: int, rank: int) -> str:
    mine, theirs = first.splitlines(), other.splitlines()
    for index in range(max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else "(nothing)"
        right = theirs[index] if index < len(theirs) else "(nothing)"
        if left != right:
            return f"  line {index + 1}\n  rank {base}: {left}\n  rank {rank}: {right}"
    return "  (no differing line)"
