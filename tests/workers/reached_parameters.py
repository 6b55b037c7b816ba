"""Batches of three ranks that reach different parameters of one model.

torchrun --nproc-per-node 3 reached_parameters.py RESULT WHICH...; or RESULT refused WHICH
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import fully_shard
from tests.launch import answer, of_all, told

WORLD = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision, self.head, self.other = (nn.Linear(4, 4) for _ in range(4))
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None, other: bool = False) -> Any:
        y = torch.tanh(self.text(x))
        if image is not None:
            y = y + self.vision(image)
        return self.other(y) if other else self.head(y)


class Two(Net):
    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        y = torch.tanh(self.text(x))
        return self.head(y).square().mean(), self.other(y + self.vision(x)).square().mean()


def value(net: nn.Module, which: str, step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    x, image = torch.randn(2 + (which == "lengths") * rank, 4, generator=random), torch.randn(2, 4, generator=random)
    first = rank == 0
    if which == "results":
        one, two = net(x)
        return one if first else two
    if which == "images":
        return net(x, image if first else None).square().mean()
    if which == "heads":
        return net(x, None, first).square().mean()
    if which == "turns":
        return net(x, None, (rank + step) % 2 == 0).square().mean()
    if which == "lengths":
        return net(x, None, rank == 1).square().mean()
    return net(x, image).square().mean()  # alike


def trained(which: str, pads: bool) -> float:
    """How far the parameters are, after some steps, from those of eager PyTorch on the mean of the ranks' losses."""
    torch.manual_seed(0)
    net = Two() if which == "results" else Net()
    eager = copy.deepcopy(net)
    fully_shard(net)
    net.set_reduce_scatter_unused_params(pads)  # type: ignore[operator]
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.05) for one in (net, eager))
    for step in range(4):
        (sum(value(eager, which, step, rank) for rank in range(WORLD)) / WORLD).backward()  # type: ignore[union-attr]
        for parameter in eager.parameters() if pads else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        theirs.step()
        theirs.zero_grad()
        value(net, which, step, dist.get_rank()).backward()
        ours.step()
        ours.zero_grad()
    pairs = zip(net.parameters(), eager.parameters(), strict=True)
    return max(float((one.full_tensor() - other).abs().max()) for one, other in pairs)  # type: ignore[attr-defined]


def accumulated() -> float:
    """A microbatch reaches what the one that synchronises does not, on one rank: together all ranks reach the same."""
    torch.manual_seed(0)
    net = Net()
    eager = copy.deepcopy(net)
    fully_shard(net)
    rank = dist.get_rank()
    for one, ranks in ((eager, range(WORLD)), (net, [rank])):
        for step in range(2):
            if one is net:
                net.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
            for other in ranks:
                swapped = step if other == 0 else 1 - step
                loss = one(torch.full((2, 4), 0.1 * (other + 1)), None, bool(swapped)).square().mean()
                (loss / (WORLD if one is eager else 1)).backward()
    known = dict(eager.named_parameters())
    found = [(one.grad, known[name].grad) for name, one in net.named_parameters()]
    assert all((one is None) == (other is None) for one, other in found)
    return max(float((one.full_tensor() - other).abs().max()) for one, other in found if one is not None)  # type: ignore[attr-defined]


def refused(result: str, which: str) -> None:
    """What each rank is told, by files: there is no process group any more."""
    rank = dist.get_rank()
    said = told(lambda: trained(which, False))
    Path(f"{result}.{rank}").write_text(said)
    everyone = [Path(f"{result}.{one}") for one in range(WORLD)]
    while rank == 0 and not all(one.exists() and one.read_text() for one in everyone):
        time.sleep(0.05)
    if rank == 0:
        Path(result).write_text(json.dumps([one.read_text() for one in everyone]))


def main(*which: str) -> list[Any]:
    found = {name: [trained(name, True)] if name != "accumulated" else [accumulated()] for name in which}
    return of_all(found | {"without": trained("alike", False)})


if __name__ == "__main__":
    if sys.argv[2] == "refused":
        dist.init_process_group("gloo")
        refused(sys.argv[1], sys.argv[3])
    else:
        answer(main)
