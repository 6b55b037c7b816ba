"""Functional all-gathers and reductions over gloo: what comes out, and which of the process group's operators carries
each out."""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.distributed import gloo_pairs
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.distributed.process_group import close

c10d, pairs = torch.ops._c10d_functional, torch.ops.fsdp_compiled_pairs
KINDS = [
    ((5,), torch.float32), ((3, 4), torch.bfloat16), ((0,), torch.float32),
    ((0, 3), torch.int64), ((2, 3), torch.complex64), ((7,), torch.bool),
]  # fmt: skip


def everyones(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(len(shape))
    return [(4 * torch.randn(shape, generator=random)).to(dtype) for _ in range(dist.get_world_size())]


def gathered(group: str, turned: bool = True) -> dict[str, Any]:
    """Whether each kind is what all ranks have, by itself and all together."""
    world, rank = dist.get_world_size(), dist.get_rank()
    given = [everyones(*kind) for kind in KINDS]
    expected = [torch.cat(all_of) for all_of in given]
    own = [all_of[rank] for all_of in given]
    if turned:  # another layout of the same, which PyTorch 2.11 refuses
        own[1] = own[1].t().contiguous().t()
    alone = [c10d.wait_tensor(c10d.all_gather_into_tensor(one, world, group)) for one in own]
    together = [c10d.wait_tensor(one) for one in c10d.all_gather_into_tensor_coalesced(own, world, group)]
    same = [
        found.dtype == right.dtype and found.shape == right.shape and torch.equal(found, right)
        for right, *both in zip(expected, alone, together, strict=True)
        for found in both
    ]
    return {
        "same": same,
        "wrong is same": torch.equal(alone[0], expected[0].roll(1)),
    }


def operators(call: Any) -> dict[str, int]:
    """How often each of the process group's gathers and exchanges was called inside."""
    with profile() as seen:
        call()
    called = (event.name for event in seen.events())
    names = [name for name in called if name.startswith("c10d::") and re.search("gather|all|recv", name)]
    return {name: names.count(name) for name in sorted(set(names))}


def reduced(group: str) -> dict[str, torch.Tensor]:
    """By kind, what every other rank's part of it is too; many are on the wire at once, and waited for backwards."""
    world, rank = dist.get_world_size(), dist.get_rank()
    started = {}
    for how in ("sum", "avg"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for size in (1, 7, 5000):
                own = everyones((world * size,), dtype)[rank]
                started[f"{how} {dtype} {size}"] = c10d.reduce_scatter_tensor(own, how, world, group)
    started["whole numbers"] = c10d.reduce_scatter_tensor(torch.arange(6 * world), "sum", world, group)
    started["rows"] = c10d.reduce_scatter_tensor(torch.ones(2 * world, 3), "sum", world, group)
    gc.collect()  # nobody but the wait needs what was started
    return {name: c10d.wait_tensor(started[name]) for name in reversed(started)}


class Bytes(TorchDispatchMode):
    """What this rank sends."""

    sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in ("alltoall_base_", "send"):
            given = args[1] if "alltoall" in str(func) else args[0][0]
            self.sent += given.nbytes
        return func(*args, **(kwargs or {}))


def unpadded(group: str) -> dict[str, Any]:
    """Slices that end in padding, of two ranks: whether what comes is what comes of all, and how much less is sent."""
    rank, same, sent = dist.get_rank(), [], []
    for filled in ((5, 7), (7, 2), (0, 7), (7, 7)):
        full = torch.zeros(2, 7)
        for one, length in enumerate(filled):
            full[one, :length] = torch.arange(1.0, 1.0 + length)
        flat = full.flatten() * (1 + rank)
        twice = [full[rank], full[rank]]
        found = [
            c10d.all_gather_into_tensor_coalesced(twice, 2, group),
            pairs.all_gather_into_tensor_coalesced(twice, [*filled, 7, 7], 2, group),
            [c10d.reduce_scatter_tensor(flat, "avg", 2, group)],
            [pairs.reduce_scatter_tensor(flat, "avg", filled, 2, group)],
        ]
        came = [[c10d.wait_tensor(one) for one in row] for row in found]
        same += [torch.equal(one, other) for k in (0, 2) for one, other in zip(came[k], came[k + 1], strict=True)]
        with Bytes() as watch:
            for one in gloo_pairs.gather(full[rank], group, filled), gloo_pairs.reduce(flat, "sum", group, filled):
                c10d.wait_tensor(one)
        sent.append(watch.sent == 4 * sum(filled))
    less = c10d.wait_tensor(gloo_pairs.gather(full[rank], group, (6, 6)))  # of (7, 7): one element too few
    return {"unpadded": same, "less is sent": sent, "less is the same": torch.equal(less, came[0][0])}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = mesh.get_group().group_name
    before = operators(lambda: gathered(group, turned=False))
    gloos = reduced(group)
    Mesh(torch.device("cpu"), dist.get_world_size(), groups={"shard": group})
    Mesh(torch.device("cpu"), dist.get_world_size(), groups={"shard": group})
    sent = operators(lambda: gathered(group))
    answer = gathered(group) | {"before": before, "sent": sent}
    found = reduced(group)
    answer["reduced"] = [torch.equal(value, gloos[name]) for name, value in found.items()]
    answer["other reduced"] = any(torch.equal(value, value.roll(1)) for value in found.values() if len(value) > 100)
    answer["exchanged"] = operators(lambda: reduced(group)).get("c10d::recv_", 0)
    answer["left"] = len(gloo_pairs._waited_for)
    if dist.get_world_size() == 2:
        answer |= unpadded(group)
    whole = torch.arange(12.0).view(6, 2)
    answer["dtensor"] = torch.equal(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, answer)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    close()


if __name__ == "__main__":
    main()
