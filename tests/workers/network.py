"""Collectives on a slow network: how long each takes, and what goes on meanwhile. torchrun network.py RESULT"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.network import Network, slow_network
from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.mesh import RankError, exchange
from tests.launch import answer

GIGABITS, LATENCY = 0.08, 0.2  # 10 MB/s: 20 ms for what is sent below; the latency is what a busy machine may lose
MESSAGE = 0.02  # seconds that a small one takes where the network is measured
SIZE = 100_000  # elements of four bytes in a whole buffer
functional = torch.ops._c10d_functional


def issue(kind: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts a collective and returns how to wait for its result."""
    group = dist.group.WORLD
    assert group is not None
    world, name = dist.get_world_size(), group.group_name
    if kind.startswith("functional"):
        result = {
            "functional all_gather": lambda: functional.all_gather_into_tensor(part, world, name),
            "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(whole, "sum", world, name),
            "functional all_to_all": lambda: functional.all_to_all_single(
                whole, [SIZE // world] * world, [SIZE // world] * world, name
            ),
            "functional all_reduce": lambda: functional.all_reduce(whole, "sum", name),
        }[kind]()
        return lambda: functional.wait_tensor(result)
    output = torch.empty_like(whole if kind == "all_gather" else part)
    work = {
        "all_gather": lambda: dist.all_gather_into_tensor(output, part, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(output, whole, async_op=True),
    }[kind]()
    assert work is not None

    def wait() -> torch.Tensor:
        work.wait()
        return output

    return wait


KINDS = (
    "functional all_gather",
    "functional reduce_scatter",
    "functional all_to_all",
    "functional all_reduce",
    "all_gather",
    "reduce_scatter",
)


def timed(kind: str) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    whole, part = torch.arange(SIZE, dtype=torch.float32), torch.full((SIZE // world,), float(rank))
    expected = issue(kind, whole, part)().clone()  # by gloo as it is
    with slow_network(GIGABITS, LATENCY) as network:
        dist.barrier()
        began = time.monotonic()
        wait = issue(kind, whole, part)
        issued = time.monotonic()
        cpu = time.process_time()
        result = wait()
        done = time.monotonic()
    (transfer,) = network.transfers
    return {
        "issuing": issued - began,
        "whole": done - began,
        "said": network.seconds(transfer.size),
        "size": transfer.size,
        "cpu while waiting": time.process_time() - cpu,
        "equal": torch.equal(result, expected),
    }


def exposed(seconds: float) -> float:
    """How long a gather is waited for with so much other work between issue and wait."""
    part = torch.zeros(SIZE // dist.get_world_size())
    with slow_network(GIGABITS, LATENCY) as network:
        dist.barrier()
        wait = issue("functional all_gather", part, part)
        time.sleep(seconds)
        wait()
    return network.transfers[0].exposed


def queued() -> list[float]:
    """When each of three gathers, issued at once, was over."""
    part = torch.zeros(SIZE // dist.get_world_size())
    with slow_network(GIGABITS, LATENCY) as network:
        dist.barrier()
        for wait in [issue("functional all_gather", part, part) for _ in range(3)]:
            wait()
    return [transfer.end - network.transfers[0].start for transfer in network.transfers]


def trained(by: str, network: float | None) -> tuple[list[float], list[str]]:
    """Losses of a few steps, and the transfers of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    names: list[str] = []
    wrapped: nn.Module = model
    if by == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    elif by == "ddp":
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by == "ours":
        sharded = compile_sharded(
            model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=Policy(lower="eager")
        )

    def step(x: torch.Tensor) -> float:
        if by == "ours":
            return sharded.step(x).item()
        loss = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def steps(wire: Network | None) -> list[float]:
        losses = []
        for number in range(3):
            if wire is not None:
                wire.transfers.clear()
            losses.append(step(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))))
        return losses

    if network is None:
        return steps(None), names
    with slow_network(network) as wire:
        losses = steps(wire)
        return losses, [transfer.name for transfer in wire.transfers]


def measured(**policy: Any) -> list[Any]:
    """What `compile_sharded` takes the network for, and says of it; or its error."""
    model = nn.Linear(8, 8)
    try:
        sharded = compile_sharded(
            model, loss=lambda model, x: model(x).square().mean(), policy=Policy(lower="eager", **policy)
        )
    except RankError as error:
        return [None, str(error)]
    plan = sharded.plan
    return [plan.policy.network, [note for note in plan.notes if note.startswith("network")], plan.machine.latency]


def main() -> dict[str, Any]:
    result = {
        "timed": {kind: timed(kind) for kind in KINDS},
        "exposed": {str(seconds): exposed(seconds) for seconds in (0.0, 0.1, 0.5)},
        "alone": LATENCY + SIZE * 4 / 2 / (GIGABITS * 1e9 / 8),
        "queued": queued(),
        "trained": {by: [trained(by, None), trained(by, 1.0)] for by in ("ours", "fsdp2", "ddp")},
    }
    with slow_network(GIGABITS, MESSAGE):
        result["measured"] = measured(network="measure")
    result["usual"] = measured(network="measure")
    result["apart"] = exchange(measured(network="measure" if dist.get_rank() else None), connect(None))
    with slow_network(GIGABITS) as left:
        pass
    dist.all_reduce(torch.zeros(1))
    result["after"] = len(left.transfers)
    other = dist.new_group(backend="gloo")
    with slow_network(GIGABITS, spared=other) as some:
        dist.all_reduce(torch.zeros(1), group=other)
        dist.broadcast(torch.zeros(3), 0)
    result["not spared"] = [(transfer.name, transfer.size) for transfer in some.take() + some.take()]
    return result


if __name__ == "__main__":
    answer(main)
