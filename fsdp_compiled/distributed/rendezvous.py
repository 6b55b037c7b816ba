"""A store of this start's own, where the launcher's outlives restarts.

torchrun's store serves every attempt that its ranks make, and a process group writes the same keys each time: a new
rank may read where a dead one listened (seen on torch 2.11 and 2.13; on gloo a restart then fails with a refused
connection). So ranks first agree on a prefix that no attempt before had:

    rank r   hello/r = a number of its own              rank 0   reads all hellos, again and again, and answers
             waits for an answer with its number in it           welcome = prefix and the numbers that it read
             ready/r = prefix                                    until every rank is ready for this prefix

An answer with a rank's own new number in it was given now, by the rank 0 of now; that it was given to a hello from
before is what rank 0 sees by nobody getting ready for it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

PREFIX = "fsdp_compiled/start"
LIMIT = 600.0  # seconds until a rank gives up waiting for the others


def own_store(rank: int, world: int, limit: float = LIMIT) -> dist.Store:
    """The launcher's store under a prefix of this attempt; ``RuntimeError`` where a rank does not come."""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=limit)))
    return dist.PrefixStore(agreed(dist.PrefixStore(PREFIX, store), rank, world, limit), store)


def outlives_restarts() -> bool:
    """Whether the store is the launcher's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agreed(store: dist.Store, rank: int, world: int, limit: float = LIMIT) -> str:
    """A prefix, the same on all ranks that run now."""
    until = time.monotonic() + limit
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank:
        while True:
            found = json.loads(store.get("welcome")) if store.check(["welcome"]) else None
            if found is not None and found["ranks"][rank : rank + 1] == [mine]:
                prefix = str(found["prefix"])
                store.set(f"ready/{rank}", prefix)
                return prefix
            _wait(until, "rank 0")
    prefix = f"{PREFIX}/{mine}"
    others = range(1, world)
    said: list[str] = []
    while True:
        names = [f"hello/{other}" for other in others]
        if not names or store.check(names):
            now = [mine, *(value.decode() for value in store.multi_get(names))]
            if now != said:
                said = now
                store.set("welcome", json.dumps({"prefix": prefix, "ranks": said}))
            ready = [f"ready/{other}" for other in others]
            if not ready or (store.check(ready) and {value.decode() for value in store.multi_get(ready)} == {prefix}):
                return prefix
        _wait(until, "all other ranks")


def _wait(until: float, whom: str) -> None:
    if time.monotonic() > until:
        raise RuntimeError(f"waited in vain for {whom} to start; look for the first error in the ranks' logs")
    time.sleep(0.01)
