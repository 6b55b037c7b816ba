"""Loops in which each rank has batches of its own lengths, with FSDP2's `fully_shard` and this package's, bit for bit.

torchrun --nproc-per-node 2 own_lengths.py RESULT
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compiled as ours
from fsdp_compiled.distributed import watchdog
from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.policy import Policy
from tests.launch import answer
from tests.loops import GPT, VOCABULARY, beside, different, gradients, weights

POLICY = Policy(lower="eager", cuda_graph=False, dynamic=False, programs=4)


def gpt(api: Any, mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(0)
    model: Any = GPT()
    for layer in model.layers:
        api.fully_shard(layer, mesh=mesh)
    return api.fully_shard(model, mesh=mesh, **({"policy": POLICY} if api is ours else {}))


def tokens(length: int) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length).mul(7 + dist.get_rank()) % VOCABULARY


def loss_of(model: Any, length: int) -> torch.Tensor:
    given = tokens(length)
    return F.cross_entropy(model(given).flatten(0, 1), given.flatten())


LENGTHS = ((5, 7), (5, 6), (4, 7), (5, 6), (3, 3), (4, 8))


def train(api: Any, rate: float = 0.1, steps: int = len(LENGTHS)) -> list[Any]:
    """In the second step rank 1 compiles while rank 0 has its program, in the third rank 0; with accumulation."""
    model = gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found: list[Any] = []
    for step, lengths in enumerate(LENGTHS[:steps]):
        model.set_requires_gradient_sync(step % 3 != 1)
        loss = loss_of(model, lengths[dist.get_rank()])
        loss.backward()
        found += [loss.detach(), *gradients(model)]
        if step % 3 != 1:
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *weights(model)]


def evaluate(api: Any) -> list[Any]:
    """More lengths than programs are kept for: some calls run eagerly, and some do not: the other rank has one."""
    model = gpt(api)
    found = []
    with torch.no_grad():
        for lengths in [(2, 3), (3, 4), (4, 5), (2, 6), (7, 3), (8, 9)]:
            found.append(model(tokens(lengths[dist.get_rank()])).clone())
    if api is ours:
        programs = model._fsdp_compiled.calls["forward"].programs
        compiled = [0] * 2
        dist.all_gather_object(compiled, programs.captures)
        assert sum(compiled) < 12 and max(compiled) > 2, compiled
    return found


def replicas(api: Any) -> list[Any]:
    """Each rank has the whole model, so that forward sends nothing; of some lengths one rank alone has a program."""
    model = gpt(api, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    found: list[Any] = []
    for lengths in [(5, 5), (5, 7), (4, 7), (5, 4)]:
        with torch.no_grad():
            found.append(model(tokens(lengths[dist.get_rank()])).clone())
    loss_of(model, 5).backward()
    return [*found, *gradients(model)]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (ours.fully_shard(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
        return self.one(self.two(x)) if turned else self.two(self.one(x))


def turned() -> str:
    """Layers of one size in another order on each rank: the collectives would pair up, and the weights be wrong."""
    model = ours.fully_shard(Turned())
    x = torch.ones(3, 4)
    said = []
    for begun in (False, True):
        try:
            if begun:
                model(x, turned=False)
            model(x, turned=dist.get_rank() == 1)
        except RankError as error:
            said.append(str(error))
    return "\n".join(said)


def main() -> dict[str, str]:
    watchdog.PATIENCE = 2.0
    found = {case.__name__: beside(case, theirs, ours) for case in (train, evaluate, replicas)}
    found["broken"] = different(train(theirs, steps=1), train(ours, 0.1000001, steps=1))
    return found | {"turned": turned()}


if __name__ == "__main__":
    answer(main)
