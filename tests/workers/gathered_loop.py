"""Evaluation that gathers once for many calls, in a loop of the user's own, on two ranks.

torchrun --nproc-per-node 2 gathered_loop.py RESULT
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch.profiler import profile

import fsdp_compiled as ours
from bench.observe import NOT_DATA
from tests.launch import answer, of_all, told
from tests.loops import batch, full, gpt, loss_of


def evaluated(model: Any, count: int) -> list[torch.Tensor]:
    return [model(batch(step)[0]).clone() for step in range(count)]


def sent(profiled: Any) -> list[str]:
    return [one.name for one in profiled.events() if one.name.startswith("c10d::") and one.name not in NOT_DATA]


def trained(api: Any, evaluate: Any) -> list[torch.Tensor]:
    """Two steps, and what is evaluated around them."""
    model = gpt(api, tie=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = evaluate(model)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += evaluate(model)
    return [*found, *(full(one) for one in model.parameters())]


def each(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return evaluated(model, 3)


def once(model: Any) -> list[torch.Tensor]:
    with model.gathered() as whole:
        assert whole is model
        return evaluated(model, 3)


def refused() -> list[str]:
    model = gpt(ours)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()

    def writing() -> None:
        with model.gathered(), torch.no_grad():
            model.head.weight.mul_(2)

    def stepping() -> None:
        with model.gathered():
            optimizer.step()
            evaluated(model, 1)

    def training() -> None:
        with model.gathered(), torch.enable_grad():
            loss_of(model, 0)

    def nested() -> None:
        with model.gathered(), model.layers[0].gathered():
            pass

    before = full(model.head.weight)
    said = [told(one) for one in (writing, stepping, training, nested)]
    loss_of(model, 1).backward()  # all is as it was
    moved = full(model.head.weight) - before
    return [*said, str(moved.abs().max().item() > 0), str(all(map(torch.equal, once(model), each(model))))]


def main() -> list[Any]:
    expected = trained(theirs, each)
    found: dict[str, Any] = {}
    found["same"] = [all(map(torch.equal, trained(ours, how), expected)) for how in (each, once)]
    model = gpt(ours)
    with model.gathered(), profile() as profiled:
        # Ranks make other calls: nothing is sent.
        evaluated(model, 1 + dist.get_rank())
        model.layers[0](torch.zeros(1, 2, 8))
    found["sent"] = sent(profiled)
    found["refused"] = refused()
    return of_all(found)


if __name__ == "__main__":
    answer(main)
