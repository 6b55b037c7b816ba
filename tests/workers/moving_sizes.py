"""Batches whose rows and lengths change, on two ranks: the same programs on both, as FSDP2's numbers.

torchrun --nproc-per-node 2 moving_sizes.py RESULT
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs

import fsdp_compiled as ours
from fsdp_compiled.distributed.mesh import RankError
from tests.launch import answer, of_all, told
from tests.loops import GPT, VOCABULARY, different, weights
from tests.toys import EAGER, batches, mse, sgd


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 2)


def step() -> Any:
    """Both ranks have the same sizes; the weights are one process's on all rows."""
    model = build()
    plain = copy.deepcopy(model)
    sharded = ours.compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    optimizer, captures = sgd(plain), []
    for rows in (4, 5, 3, 9, 4):
        x, y = batches(1, 2 * rows)[0]
        mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        sharded.step(x[mine], y[mine])
        optimizer.zero_grad()
        mse(plain, x, y).backward()
        optimizer.step()
        captures.append(sharded.captures)
    for name, value in sharded.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    return captures


def loop() -> Any:
    """As FSDP2, bit for bit; how many programs a rank made in a loop with lengths of its own."""

    def run(api: Any) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model: Any = GPT()
        for layer in model.layers:
            api.fully_shard(layer)
        api.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for lengths in [(5, 7), (4, 7), (3, 5), (6, 8), (7, 3), (5, 4)]:
            given = torch.arange(2 * lengths[dist.get_rank()]).view(2, -1) % VOCABULARY
            torch.nn.functional.cross_entropy(model(given).flatten(0, 1), given.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), model

    expected, _ = run(theirs)
    found, model = run(ours)
    return [different(found, expected), model._fsdp_compiled.calls["forward"].programs.captures]


def sizes_by_rank() -> Any:
    """In a step, ranks have the same sizes, whichever programs there are; after an error they go on."""
    model = build()
    sharded = ours.compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    for rows in (4, 5, 3):
        sharded.step(*batches(1, rows)[0])
    said = []
    for rows in ((6, 7), (7, 6), (4, 6), (9, 4)):
        before = sharded.full_state_dict()
        error = told(partial(sharded.step, *batches(1, rows[dist.get_rank()])[0]))
        named = all(f"rank {rank}: step (float32[{rows[rank]}, 6]" in error for rank in (0, 1))
        said.append(error.startswith("RankError") and named)
        after = sharded.full_state_dict()
        said.append(all(torch.equal(before[name], after[name]) for name in before))
    for rows in (4, 5, 6 + dist.get_rank()):
        sharded.accumulate(*batches(1, rows)[0])
    return [*said, told(lambda: sharded.step(*batches(1, 6)[0])).startswith("RankError")]


def refused() -> Any:
    """What cannot be made for several sizes falls back on both ranks; other sizes than another rank's are an error."""

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return mse(model, x, y), {"half": len(x) / 2}

    sharded = ours.compile_sharded(build(), loss=loss, policy=EAGER)
    halves = [sharded.value_and_grad(*batches(1, rows)[0])[0][1]["half"] for rows in (4, 3, 6)]
    said = told(lambda: sharded.value_and_grad(*batches(1, 7 + dist.get_rank())[0]))
    assert RankError.__name__ in said and "float32[7, 6]" in said, said
    return [halves, sharded.captures]


def main() -> list[Any]:
    return of_all({case.__name__: case() for case in (step, loop, sizes_by_rank, refused)})


if __name__ == "__main__":
    answer(main)
