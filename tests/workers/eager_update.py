"""Optimizers that run as they are, on shards and on whole parameters, beside eager PyTorch on all ranks' batches.

torchrun --nproc-per-node 2 eager_update.py RESULT
"""

from __future__ import annotations

import os
from typing import Any

import torch

from fsdp_compiled import Policy, RankError, compile_sharded
from tests.chosen import examples
from tests.launch import answer
from tests.untraced import Average, Idle, Queue, batches, eagerly, groups, loss

RANK = int(os.environ["RANK"])


def differs(kind: Any, shard: str) -> str:
    eager, model = Idle(), Idle()
    theirs, mine = kind(groups(eager)), kind(groups(model))
    eagerly(eager, theirs, batches(2))  # state that is brought along
    eagerly(model, mine, batches(2))
    sharded = compile_sharded(model, mine, loss=loss, policy=Policy(lower="eager", shard=shard))  # type: ignore[arg-type]
    for index, batch in enumerate(batches(5)):
        for optimizer in (theirs, mine):
            optimizer.param_groups[0]["decay"] = 0.1 * index
        sharded.step(batch[2 * RANK : 2 * RANK + 2])
        eagerly(eager, theirs, [batch])
    found = sharded.full_state_dict()
    if odd := [name for name, v in found.items() if not torch.allclose(v, eager.state_dict()[name], 1e-5, 1e-6)]:
        return f"{odd} differ"
    mine.param_groups[0]["decay"] = 0.1 + RANK
    try:
        sharded.step(torch.ones(2, 6))
    except RankError:
        mine.param_groups[0]["decay"] = 0.1
    else:
        return "ranks that decay differently went on"
    sharded.step(torch.ones(2, 6))
    return ""


SHARDS = ("zero3", "zero2", "zero1", "ddp")
# Each placement, and both kinds with parameters in shards and whole; zero1 and zero2 lay them out alike.
CHOSEN = {Average: ("zero3", "zero2", "ddp"), Queue: ("zero3", "zero1")}


def main() -> dict[str, str]:
    chosen = examples(CHOSEN, dict.fromkeys(CHOSEN, SHARDS))
    return {f"{kind.__name__} {shard}": differs(kind, shard) for kind, shards in chosen.items() for shard in shards}


if __name__ == "__main__":
    answer(main)
