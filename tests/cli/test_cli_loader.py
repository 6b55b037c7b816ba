"""The order of the windows, and how they are dealt out: nothing is skipped or seen twice, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled.cli.data import IGNORED, Loader, Windows, share

CONTEXT = 2


def windows(count: int) -> Windows:
    """Window i holds the tokens 2i and 2i + 1."""
    return Windows(torch.arange(count * CONTEXT + 1, dtype=torch.uint8), CONTEXT)


def loaders(data: Windows, batch: int, world: int, most: int, seed: int = 3) -> list[Loader]:
    return [Loader(data, share(batch, world, most), seed, rank) for rank in range(world)]


def taken(ranks: list[Loader]) -> list[int]:
    """The windows of one step of all ranks, by what stands in them."""
    found = []
    for rank in ranks:
        for tokens, targets in next(rank):
            real = targets[:, 0] != IGNORED
            assert torch.equal(targets[real], tokens[real] + 1)
            found += [row // CONTEXT for row in tokens[real][:, 0].tolist()]
    return found


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 30),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_steps_are_the_same_on_any_ranks_and_across_restarts(
    count: int, batch: int, worlds: list[tuple[int, int, int]]
) -> None:
    data = windows(count)
    plain = loaders(data, batch, 1, batch)
    seen: Counter[int] = Counter()
    state = plain[0].state_dict()
    for world, most, steps in worlds:  # a restart on each of these
        ranks = loaders(data, batch, world, most)
        for rank in ranks:
            rank.load_state_dict(state)
        for _ in range(steps):
            found = taken(ranks)
            assert found == taken(plain)
            seen.update(found)
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
        state = ranks[0].state_dict()
    assert max(seen.values(), default=0) - min((seen[index] for index in range(count)), default=0) <= 1


def test_epochs_have_other_orders_and_seeds_too() -> None:
    data = windows(50)
    (one,), (other,) = loaders(data, 50, 1, 50), loaders(data, 50, 1, 50, seed=4)
    orders = [taken([one]), taken([one]), taken([other]), taken([other])]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert all(a != b for a, b in pairwise([*orders, orders[0]])) and orders[1] != orders[3] != orders[0]


@pytest.mark.parametrize(
    ("batch", "world", "most", "rows", "parts", "padded"),
    [
        (32, 2, 16, 16, 1, False),
        (32, 1, 16, 16, 2, False),  # fewer ranks: more microbatches of the same rows
        (32, 4, 16, 8, 1, False),  # more ranks: fewer rows
        (64, 3, 16, 11, 2, True),
        (3, 4, 16, 1, 1, True),  # a rank may have nothing that counts
    ],
)
def test_shares(batch: int, world: int, most: int, rows: int, parts: int, padded: bool) -> None:
    how = share(batch, world, most)
    assert (how.rows, how.parts, how.padded) == (rows, parts, padded)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Loader(windows(9), share(4, 1, 4), 3, 0), "number of bytes"),
        (Loader(Windows(torch.zeros(41, dtype=torch.uint8), 2), share(4, 1, 4), 3, 0), "checksum"),
        (Loader(Windows(windows(20).text, 4), share(4, 1, 4), 3, 0), "--context"),
        (Loader(windows(20), share(4, 1, 4), 5, 0), "--seed"),
        (Loader(windows(20), share(8, 1, 4), 3, 0), "windows in a step"),
    ],
)
def test_a_position_in_other_data_is_refused(other: Loader, said: str) -> None:
    one = Loader(windows(20), share(4, 1, 4), 3, 0)
    next(one)
    before = other.position
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(one.state_dict())
    assert other.position == before
