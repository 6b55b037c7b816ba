"""Functional all-gathers over gloo: what comes out, and which of the process group's operators carries each out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import profile

from fsdp_compiled.distributed.mesh import Mesh
from tests.launch import answer, of_all

c10d = torch.ops._c10d_functional
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
    """How often each of the process group's gathers was called inside."""
    with profile() as seen:
        call()
    called = (event.name for event in seen.events())
    names = [name for name in called if name.startswith("c10d::") and "gather" in name]
    return {name: names.count(name) for name in sorted(set(names))}


def main() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = mesh.get_group().group_name
    before = operators(lambda: gathered(group, turned=False))
    Mesh(torch.device("cpu"), dist.get_world_size(), groups={"shard": group})
    Mesh(torch.device("cpu"), dist.get_world_size(), groups={"shard": group})
    sent = operators(lambda: gathered(group))
    found = gathered(group) | {"before": before, "sent": sent}
    whole = torch.arange(12.0).view(6, 2)
    found["dtensor"] = torch.equal(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
    return of_all(found)


if __name__ == "__main__":
    answer(main)
