"""Units that stay cut over two of four ranks between forward and backward, beside FSDP2's; and ranks that disagree.

torchrun --nproc-per-node 4 reshard_onto.py RESULT
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs

from fsdp_compiled import Policy, compile_sharded, fully_shard
from tests.launch import answer, of_all, told
from tests.toys import Net

STEPS, ROWS, WIDTH, RATE = 3, 5, 6, 1e-2
EAGER = Policy(lower="eager")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randint(2, (ROWS,), generator=generator))
        for _ in range(STEPS)
    ]


def net() -> Net:
    torch.manual_seed(0)
    return Net(WIDTH)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def loop(shard: Callable[..., Any], onto: Callable[[int], Any], **options: Any) -> list[torch.Tensor]:
    """The losses and then the weights of a loop whose blocks are resharded onto so many ranks, by their number."""
    model = net()
    for number, block in enumerate(model.blocks):
        shard(block, reshard_after_forward=onto(number), **options)
    model = shard(model, reshard_after_forward=onto(-1), **options)
    optimizer, found = optimizer_of(model), []
    for x, y in batches():
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [one.full_tensor().detach() for one in model.parameters()]  # type: ignore[attr-defined]


def ours(onto: Callable[[int], Any] = lambda number: 2, policy: Policy = EAGER, **options: Any) -> list[torch.Tensor]:
    return loop(lambda module, **others: fully_shard(module, policy=policy, **others), onto, **options)


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def is_fsdp2() -> Any:
    """Bit for bit, with one number for all and with another way for each block."""
    alike, apart = loop(theirs, lambda number: 2), Policy(lower="eager", bucket_mb=0)
    found = [equal(ours(), alike), equal(ours(policy=apart), alike)]
    by_block = (2, True, 2, False)
    return [*found, equal(*(one(by_block.__getitem__, mp_policy=BF16) for one in (ours, partial(loop, theirs))))]


def is_what_it_is_without() -> Any:
    """Under `compile_sharded`, by policy."""
    found = {}
    for fields in ({"lower": "inductor"}, {"precision": BF16, "kernels": True, "copies": True}, {"verify": 1}):
        results = []
        for onto in (None, 2):
            model = net()
            policy = Policy(**{"lower": "eager", **fields, "reshard_onto": onto})  # type: ignore[arg-type]
            sharded = compile_sharded(model, optimizer_of(model), loss=loss_of, policy=policy)
            losses = [sharded.step(*batch).detach() for batch in batches()]
            results.append([*losses, *(one.full_tensor().detach() for one in sharded.model.parameters())])  # type: ignore[attr-defined]
        found[" ".join(fields)] = equal(*results)
    return found


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y)


def disagree() -> Any:
    """Ranks that give other numbers: an error on each, in its first call."""
    own = 2 if dist.get_rank() else True
    return told(lambda: ours(lambda number: own)), told(lambda: disagreeing_policies())


def disagreeing_policies() -> Any:
    model = net()
    policy = Policy(lower="eager", reshard_onto=2 if dist.get_rank() else None)
    return compile_sharded(model, optimizer_of(model), loss=loss_of, policy=policy).step(*batches()[0])


def refused() -> Any:
    model = net()
    return [
        told(lambda: fully_shard(model, reshard_after_forward=3)),
        told(lambda: compile_sharded(model, loss=loss_of, policy=Policy(reshard_onto=3))),
        all(type(one) is nn.Parameter for one in model.parameters()),
    ]


def several_models() -> Any:
    """A group of neighbours is made once."""
    before = len(dist.distributed_c10d._world.pg_map)
    ours()
    ours()
    return len(dist.distributed_c10d._world.pg_map) - before


def main() -> list[Any]:
    cases = (is_fsdp2, is_what_it_is_without, refused, several_models, disagree)
    return of_all({case.__name__: case() for case in cases})


if __name__ == "__main__":
    answer(main)
