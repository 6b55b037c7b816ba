"""Makes this rank's `Mesh` from the user's ``DeviceMesh``, or from all ranks that torchrun started.

The process group is started here if nobody has started it; `process_group` ends it.

If the launcher's store outlives restarts, this start has a store of its own (`own_store`). torchrun's store serves
every attempt that its ranks make, and a process group writes the same keys each time. So a new rank may read where a
dead one listened (seen on torch 2.11 and 2.13; on gloo a restart then fails with a refused connection). Therefore ranks
first agree on a prefix that no attempt before had:

    rank r   hello/r = a number of its own              rank 0   reads all hellos, again and again, and answers
             waits for an answer with its number in it           welcome = prefix and the numbers that it read
             ready/r = prefix                                    until every rank is ready for this prefix

An answer with a rank's own new number in it was given now, by the rank 0 of now. If rank 0 answered a hello of an
earlier attempt, it sees that from nobody getting ready for the answer.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compiled.distributed.mesh import Mesh, agree
from fsdp_compiled.distributed.process_group import NCCL, close, default_device, set_nccl
from fsdp_compiled.plan.plan import axis_of

# What the axes of a ``DeviceMesh`` are called here: by our names, and by torchtitan's.
AXES = {
    "replicate": "replicate", "dp_replicate": "replicate", "shard": "shard", "dp_shard": "shard", "fsdp": "shard",
    "tp": "tp",
}  # fmt: skip


def connect(mesh: DeviceMesh | None, device: torch.device | None = None) -> Mesh:
    """This rank's `Mesh`: from a ``DeviceMesh``, or all ranks there are.

    Without a mesh, a process group that runs already is used. Otherwise, under ``torchrun`` (``RANK`` and
    ``WORLD_SIZE`` in the environment), one is started, nccl on GPUs and gloo on CPUs, and closed when Python exits.
    Otherwise the world is one rank. On GPUs the rank's own becomes the current device, even if a process group runs
    already: Python objects that ranks exchange go through the current device.
    """
    if device is not None and device.type == "meta":
        device = None
    if mesh is not None:
        return _place(mesh)
    if not dist.is_available():
        return Mesh(device or default_device())
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        device = default_device()
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = {}
        if outlives_restarts():
            store = {"store": own_store(rank, world), "rank": rank, "world_size": world}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            for name, value in NCCL.items():
                os.environ.setdefault(name, value)
            # Connects now, and knows its GPU in every call.
            dist.init_process_group("nccl", device_id=device, **store)
        else:
            dist.init_process_group("gloo", **store)
        atexit.register(close)
    if not dist.is_initialized():
        return Mesh(device or default_device())
    device = device or default_device()
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        set_nccl()
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    groups = {"shard": group.group_name} if world > 1 else {}
    return Mesh(device, world, 1, rank, rank, groups)


def _place(mesh: DeviceMesh) -> Mesh:
    _check_is_mesh(mesh)
    axes = _axes_of(mesh)
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh holds {mesh.size()} ranks, but the world has {dist.get_world_size()}; every rank must be in the "
            "mesh."
        )
    tp = None if "tp" not in axes else mesh if mesh.ndim == 1 else mesh["tp"]
    return replace(_mesh(mesh, {axis: dim for axis, dim in axes.items() if axis != "tp"}, tp), given=mesh)


def _mesh(mesh: DeviceMesh, axes: Mapping[str, int], tp: DeviceMesh | None) -> Mesh:
    """This rank's place. ``axes``: the dimension of the mesh for each of our axes but tp."""
    set_nccl()
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = default_device()
        torch.cuda.set_device(device)
    _check_order(mesh)  # the first message, so after what NCCL reads before it
    sizes = {axis: mesh.size(dim) for axis, dim in axes.items()}
    place = mesh.get_coordinate()
    assert place is not None
    ranks = {axis: place[dim] for axis, dim in axes.items()}
    groups = {axis: mesh.get_group(dim).group_name for axis, dim in axes.items() if sizes[axis] > 1}
    if tp is not None:
        groups["tp"] = tp.get_group().group_name
    return Mesh(
        device,
        sizes.get("shard", 1),
        sizes.get("replicate", 1),
        ranks.get("shard", 0),
        dist.get_rank(),
        groups,
        tp.size() if tp is not None else 1,
        tp.get_local_rank() if tp is not None else 0,
        ranks.get("replicate", 0),
        tp,
    )


def _check_is_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh from "
            "torch.distributed.device_mesh.init_device_mesh."
        )


def _check_order(mesh: DeviceMesh) -> None:
    """Raises on every rank where one was given another mesh, or one whose ranks along an axis are not in the order of
    their process group.

    A collective deals data out in the order of the group, and ``DTensor`` in that of the mesh. Ranks compare a mesh the
    first time that a world uses it. A rank whose later mesh is in disorder raises alone: others may know theirs.
    """
    world = dist.get_world_size()
    seen, failure = _of_world().compared, None
    try:
        _check_ascending(mesh)
    except ValueError as error:
        if seen or dist.get_backend() == "fake":
            raise
        failure = error
    # By value, not by object, which the garbage collector takes earlier on one rank than on another.
    own = f"{mesh.mesh.tolist()} along {mesh.mesh_dim_names or mesh.ndim}"
    if own not in seen and dist.get_backend() != "fake":
        text = own if mesh.size() == world else f"{list(mesh.shape)}"  # beside another axis ranks have others
        agree(Mesh(torch.device("cpu"), world, rank=dist.get_rank()), "The DeviceMesh", text, failure)
        seen.add(own)


def connect_neighbours(mesh: Mesh, sizes: Iterable[int]) -> None:
    """Adds to the mesh's groups, for each size, that of this rank and its neighbours along the shard axis (see
    `plan.plan`). Collective the first time; all ranks have the same sizes."""
    for size in sorted({one for one in sizes if axis_of(one) not in mesh.groups}):
        along = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(mesh.groups["shard"]))
        ranks = tuple(along[mesh.shard_rank // size * size :][:size])
        known = _of_world().neighbours
        if ranks not in known:  # only these ranks meet for it
            known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True).group_name
        mesh.groups[axis_of(size)] = known[ranks]


class _World:
    """What belongs to the process group of all ranks, and ends with it."""

    def __init__(self, group: Any) -> None:
        self.group = weakref.ref(group)
        self.compared: set[str] = set()  # meshes, by value
        self.neighbours: dict[tuple[int, ...], str] = {}  # groups, by ranks
        # Of all ranks, by kind of device, as long as somebody has it. Each call of `fully_shard` asks for one.
        self.meshes: weakref.WeakValueDictionary[str, DeviceMesh] = weakref.WeakValueDictionary()


def _of_world() -> _World:
    group = dist.group.WORLD
    if not _world or _world[0].group() is not group:
        _world[:] = [_World(group)]
    return _world[0]


_world: list[_World] = []


def _check_ascending(mesh: DeviceMesh) -> None:
    place = mesh.get_coordinate()
    for dim in range(mesh.ndim):
        there = dist.get_process_group_ranks(mesh.get_group(dim))
        here = mesh.mesh[tuple(slice(None) if other == dim else place[other] for other in range(mesh.ndim))].tolist()  # type: ignore[index]
        if here != there:
            raise ValueError(
                f"mesh has the ranks {here} along its axis {dim}, whose process group has them in the order {there}. "
                "Give ranks in ascending order, as init_device_mesh does."
            )


def device_mesh_of_all() -> DeviceMesh:
    """All ranks on one axis. Under ``torchrun`` the process group is started; otherwise one of a single rank is."""
    place = connect(None)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(close)
    kind, known = place.device.type, _of_world().meshes
    if (mesh := known.get(kind)) is None:
        mesh = known[kind] = init_device_mesh(kind, (dist.get_world_size(),))
    return mesh


def tp_beside(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis named "tp" of the mesh that this one is a part of, if that mesh has one besides.

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
    """This rank's place in a mesh. Its only axis shards; or its first replicates and its second shards. Names are free.

    ``tp``: an axis beside it.
    """
    _check_is_mesh(mesh)
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
    return _mesh(mesh, {"shard": mesh.ndim - 1} | ({"replicate": 0} if mesh.ndim == 2 else {}), tp)


def _axes_of(mesh: DeviceMesh) -> dict[str, int]:
    """The dimension of the mesh for each of our axes."""
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


PREFIX = "fsdp_compiled/start"
LIMIT = 600.0  # seconds until a rank gives up waiting for the others


def own_store(rank: int, world: int, limit: float = LIMIT) -> dist.Store:
    """The launcher's store under a prefix of this attempt. Raises ``RuntimeError`` if a rank does not come."""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=limit)))
    return dist.PrefixStore(agreed(dist.PrefixStore(PREFIX, store), rank, world, limit), store)


def outlives_restarts() -> bool:
    """Whether the store is the launcher's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agreed(store: dist.Store, rank: int, world: int, limit: float = LIMIT) -> str:
    """A prefix, the same on all ranks that run now."""
    until = time.monotonic() + limit
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank:
        while True:
            found = json.loads(store.get("welcome")) if store.check(["welcome"]) else None
            if found is not None and found["ranks"][rank : rank + 1] == [mine]:
                prefix = str(found["prefix"])
                store.set(f"ready/{rank}", prefix)
                return prefix
            _wait(until, "rank 0")
    prefix = f"{PREFIX}/{mine}"
    others = range(1, world)
    said: list[str] = []
    while True:
        names = [f"hello/{other}" for other in others]
        if not names or store.check(names):
            now = [mine, *(value.decode() for value in store.multi_get(names))]
            if now != said:
                said = now
                store.set("welcome", json.dumps({"prefix": prefix, "ranks": said}))
            ready = [f"ready/{other}" for other in others]
            if not ready or (store.check(ready) and {value.decode() for value in store.multi_get(ready)} == {prefix}):
                return prefix
        _wait(until, "all other ranks")


def _wait(until: float, whom: str) -> None:
    if time.monotonic() > until:
        raise RuntimeError(f"waited in vain for {whom} to start; look for the first error in the ranks' logs")
    time.sleep(0.01)
