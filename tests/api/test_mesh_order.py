"""Meshes whose ranks are in another order than in their process groups, or that are others on other ranks, are refused
under both faces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compiled import compile_sharded, fully_shard
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "verify.py"
HSDP = ("replicate", "shard")


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, face: str) -> None:
    net = nn.Linear(4, 4)
    if face == "fully_shard":
        fully_shard(net, mesh=mesh)
    else:
        compile_sharded(net, torch.optim.SGD(net.parameters(), 0.1), mesh=mesh)


@pytest.mark.parametrize("face", ["fully_shard", "compile_sharded"])
@pytest.mark.parametrize("ranks", [[3, 2, 1, 0], [0, 2, 1, 3], [[1, 0], [3, 2]], [[2, 3], [0, 1]]])
def test_another_order_is_refused(four_ranks: None, ranks: list[int] | list[list[int]], face: str) -> None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=HSDP if isinstance(ranks[0], list) else None)
    with pytest.raises(ValueError, match=r"along its axis \d, whose process group has them in the order .* ascending"):
        sharded(mesh, face)


@pytest.mark.parametrize("face", ["fully_shard", "compile_sharded"])
@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_ascending_orders_are_not(four_ranks: None, ranks: list[int] | list[list[int]], face: str) -> None:
    sharded(DeviceMesh("cpu", ranks, mesh_dim_names=HSDP if isinstance(ranks[0], list) else None), face)


def test_meshes_that_differ_between_ranks_are_an_error_on_both() -> None:
    """In disorder on one; in order on both; and in order again."""
    first, second = (one["result"] for one in launch(WORKER, 2, "different_meshes")["different_meshes"])
    assert first.count("RankError: rank 1 failed, so no rank goes on. It said:") == 2, first
    assert second.count("ValueError: mesh has the ranks [1, 0] along its axis 0") == 2, second
    for one in (first, second):
        assert one.count("RankError: The DeviceMesh differs between rank 0 and rank 1.") == 1, one
