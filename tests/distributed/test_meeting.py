"""Meetings: each rank gets one verdict, the same that reading everyone's post would give, by few messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled.distributed import meeting
from fsdp_compiled.distributed.call_store import MEETS, Board, Posted
from fsdp_compiled.distributed.meeting import Broken, Meeting, Verdict

LIMIT = 20.0  # seconds, of which no test but one uses any


class Counting:
    """A store that many ranks share, and how many messages each sent."""

    def __init__(self, store: dist.Store, sent: Counter[int], rank: int) -> None:
        self._store, self._sent, self._rank = store, sent, rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self._sent[self._rank] += 1
        return getattr(self._store, name)  # type: ignore[no-any-return]


def label_of(call: Posted) -> str:
    return call.label


def part_of(call: Posted) -> str:
    return f"{call.wire}|{call.label.partition(' ')[0]}"


def hold(
    posts: list[Posted | int | None], limit: float = LIMIT, interval: float = 0.0
) -> tuple[dict[int, Verdict], Counter[int]]:
    """The verdict of each rank that meets, and the messages of each. A rank posts this, ends after so many calls, or
    does nothing."""
    store, sent = dist.HashStore(), Counter[int]()
    boards = [Board(Counting(store, sent, rank), rank, len(posts)) for rank in range(len(posts))]  # type: ignore[arg-type]
    for board, post in zip(boards, posts, strict=True):
        board.interval = interval or board.interval
        if isinstance(post, Posted):
            board.post(post)
        elif post is not None:
            board.end(post)
    sent.clear()
    meets = {board.rank: post for board, post in zip(boards, posts, strict=True) if post and isinstance(post, Posted)}
    meets = {rank: post for rank, post in meets.items() if post.wire == MEETS}
    with ThreadPoolExecutor(len(posts)) as pool:
        said = pool.map(lambda rank: Meeting(boards[rank], meets[rank], limit).verdict(label_of, part_of, None), meets)
        return dict(zip(meets, said, strict=True)), sent


def here(label: str = "save to a", wire: str = MEETS) -> Posted:
    return Posted(7, wire, label)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [here(), here(), here(), here("save to b"), here("load from a"), here(wire="aa"), here("step", "bb"), 3]
        ),
        min_size=2,
        max_size=7,
    )
)
def test_all_get_the_verdict_that_reading_all_posts_gives(posts: list[Posted | int | None]) -> None:
    found, _ = hold(posts)
    seen = {rank: one if isinstance(one, Posted) else Posted(7, MEETS, f"gone after {one} calls") for rank, one in
            enumerate(posts)}  # fmt: skip
    expected = Verdict.of(seen, label_of, part_of)
    for verdict in found.values():
        assert (verdict.alike, verdict.near) == (expected.alike, expected.near)
        assert verdict.near or verdict.posted == expected.posted


def test_it_is_near_where_only_the_rest_differs() -> None:
    found, _ = hold([here("save to a"), here("save to b"), here("save to c")])
    assert [(one.alike, one.near) for one in found.values()] == [(False, True)] * 3


ODD: dict[str, Posted | int | None] = {
    "another call": here("load from a"),
    "went on": here("step", "bb"),
    "ended": 3,
    "never came": None,
}


@pytest.mark.parametrize("odd", [None, *ODD])
def test_of_many_ranks_one_reads_what_all_posted_and_the_others_hear_of_it(odd: str | None) -> None:
    """If each of these 40 ranks read what all posted, the store would answer 1,600 times at the least."""
    posts: list[Posted | int | None] = [here()] * 40
    if odd is not None:
        posts[17] = ODD[odd]
    found, sent = hold(posts, limit=1.0 if odd == "never came" else LIMIT, interval=0.1)
    if odd is None:
        assert all(one.alike for one in found.values())
    else:
        (verdict,) = {repr(one) for one in found.values()}
        assert "alike=False" in verdict and "17: Posted(" in verdict and "0: Posted(" in verdict
        said = {"ended": "gone after 3 calls", "never came": "still absent after 0 calls"}
        assert said.get(odd, getattr(posts[17], "label", "")) in verdict
    counts = sorted(sent.values())
    assert counts[-1] <= 240 and counts[-2] <= 80, counts


def test_those_who_went_on_are_in_the_verdict_however_many_ranks_there_are() -> None:
    """Who meets must know whether somebody waits for it in a collective."""
    posts = {rank: here(f"save to {rank}") for rank in range(100)} | {99: here("step", "bb")}
    verdict = Verdict.of(posts, label_of, part_of)
    assert len(verdict.posted) <= meeting.SHOWN + 1 and verdict.posted[99].wire == "bb" and 0 in verdict.posted
    assert Verdict.read(verdict.written()) == verdict


def test_what_a_meeting_left_in_the_store_goes_with_a_later_one() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, 2) for rank in range(2)]
    before: list[Meeting | None] = [None, None]

    def meet(rank: int, number: int) -> bool:
        board = boards[rank]
        post = Posted(number, MEETS, "save to a")
        board.post(post)
        last, before[rank] = before[rank], (now := Meeting(board, post, LIMIT))
        return now.verdict(label_of, part_of, last).alike

    keys = []
    for number in range(1, 6):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(meet, range(2), [number] * 2)) == [True, True]
        keys.append(store.num_keys())
    assert keys[-1] == keys[1], keys


def test_a_call_that_meets_again_finds_the_verdict() -> None:
    """Rank 0 counts itself twice: with the second time the count is full, though rank 1 is still to come."""
    store, post = dist.HashStore(), here()
    boards = [Board(store, rank, 2) for rank in range(2)]
    for board in boards:
        board.post(post)
    first = Meeting(boards[0], post, limit=0.0)  # does not wait for rank 1, which has posted the same
    assert first.verdict(label_of, label_of, None).alike
    assert Meeting(boards[0], post, LIMIT).verdict(label_of, label_of, first).alike
    began = time.monotonic()
    assert Meeting(boards[1], post, LIMIT).verdict(label_of, label_of, None).alike
    assert time.monotonic() - began < LIMIT / 2


def test_a_reason_why_no_rank_goes_on_ends_it() -> None:
    board = Board(dist.HashStore(), 0, 2)
    board.post(here())
    board.fail("because")
    with pytest.raises(Broken, match="because"):
        Meeting(board, here(), LIMIT).verdict(label_of, label_of, None)
