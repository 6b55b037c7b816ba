"""Cases on two ranks, for the workers that have some: what every rank raised or saw, written by rank 0 as JSON.

torchrun --nproc-per-node 2 WORKER RESULT CASE [CASE ...], where the worker ends with ``main(globals())``
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.distributed import watchdog
from fsdp_compiled.distributed.process_group import close
from tests.toys import mse

RANK = int(os.environ["RANK"])
watchdog.PATIENCE = 1.0
EAGER = Policy(lower="eager")


def net(width: int = 6, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 2))


def shard(policy: Policy = EAGER, **options: Any) -> Sharded:
    model = net(**options)
    return compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mse, policy=policy)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 4), torch.ones(rows, 2)


def unchanged(sharded: Sharded, call: Callable[[], Any]) -> Any:
    """Makes the call, and adds to its error whether the shards are what they were."""
    before = [shard.clone() for shard in sharded.state.parameters.values()]
    try:
        return call()
    except Exception as error:
        after = sharded.state.parameters.values()
        error.add_note(f"unchanged: {all(map(torch.equal, before, after))}")
        raise


class Experts(nn.Module):
    """Words go to one of two experts; each rank uses rows of the embedding of its own, and ``idle`` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.idle, self.head = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, words: torch.Tensor, *, plain: bool = False) -> torch.Tensor:
        x = self.embed(words)
        first, second = (expert(x) for expert in self.experts)
        return self.head(x if plain else torch.where((words < 4)[:, None], first, second))


def entropy(model: nn.Module, words: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(words, **options), words)


def run(cases: Mapping[str, Any], case: str) -> dict[str, Any]:
    try:
        result = cases[case]()
        return {"result": result if isinstance(result, dict) else repr(result)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "notes": getattr(error, "__notes__", [])}


def main(cases: Mapping[str, Any]) -> None:
    """Each case in a process group of its own: some leave theirs."""
    path, *names = sys.argv[1:]
    store, _, world = next(dist.rendezvous("env://"))
    results = {}
    for case in names:
        dist.init_process_group("gloo", store=dist.PrefixStore(case, store), rank=RANK, world_size=world)
        store.set(f"{case}/{RANK}", json.dumps(run(cases, case)))
        results[case] = [json.loads(store.get(f"{case}/{rank}")) for rank in range(world)]
        gc.collect()  # a Sharded whose call has failed watches for its ranks as long as there is one
        close()
    if RANK == 0:
        with open(path, "w") as file:
            json.dump(results, file)
        store.get("read/1")
    else:
        store.set("read/1", "yes")
