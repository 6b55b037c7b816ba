"""Ranks that start again at the same store agree on a prefix that no attempt before had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from fsdp_compiled.distributed.device_mesh import agreed


def start(store: dist.Store, world: int, ranks: list[int] | None = None, limit: float = 20.0) -> list[str]:
    """Every rank's prefix; ``ranks``: those that come."""
    with ThreadPoolExecutor(world) as pool:
        coming = range(world) if ranks is None else ranks
        waiting = [pool.submit(agreed, store, rank, world, limit) for rank in coming]
        return [one.result() for one in waiting]


def test_each_attempt_has_a_prefix_of_its_own_whatever_the_world() -> None:
    store, seen = dist.HashStore(), set()
    for world in (3, 3, 1, 4, 2):
        prefixes = start(store, world)
        assert len(prefixes) == world and len(set(prefixes)) == 1
        seen.update(prefixes)
    assert len(seen) == 5


@pytest.mark.parametrize("died", [[0], [1], [0, 1]])
def test_an_attempt_that_broke_off_while_starting_leaves_nothing_that_misleads(died: list[int]) -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="waited in vain"):
        start(store, 3, ranks=died, limit=0.1)
    first = start(store, 3)
    assert len(set(first)) == 1
    with pytest.raises(RuntimeError, match="waited in vain for rank 0"):  # not content with an answer of before
        start(store, 3, ranks=[1, 2], limit=0.1)
    assert set(start(store, 3)) != set(first)
