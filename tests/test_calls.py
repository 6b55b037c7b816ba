"""The board of calls: what a rank reads there of others that do something else, wait, or are gone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled.calls import Calls, _finish
from fsdp_compiled.mesh import Mesh, RankError

CLOSED = RuntimeError("[pair.cc] Connection closed by peer")


def boards(world: int) -> list[Calls]:
    """Each rank's side of one board, in this process."""
    store = dist.HashStore()
    found = []
    for rank in range(world):
        calls = Calls(Mesh(torch.device("cpu")))
        calls.mesh, calls.store = Mesh(torch.device("cpu"), shard=world, rank=rank), store
        found.append(calls)
    return found


def end(calls: Calls) -> None:
    assert calls.store is not None
    _finish(calls.store, calls.mesh.rank, calls._made)


def test_ranks_that_make_the_same_call_meet() -> None:
    first, second = boards(2)
    for calls in (first, second):
        calls.post("step (a)")
    first.meet("step (a)")
    second.meet("step (a)")
    assert first.reason(CLOSED) is None


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    first, second = boards(2)
    for _ in range(3):
        first.post("step (a)")
    second.post("step (a)")
    end(second)
    first.post("full_state_dict")
    with pytest.raises(RankError, match=r"rank 0: full_state_dict\n  rank 1: gone after 1 call\n.*sharded\.join"):
        first.meet("full_state_dict")


def test_a_rank_that_ended_after_the_same_call_is_met() -> None:
    first, second = boards(2)
    for calls in (first, second):
        calls.post("full_state_dict")
    end(second)
    first.meet("full_state_dict")


@pytest.mark.parametrize("ahead", [1, 70])
def test_who_is_gone_is_read_off_the_board_when_a_connection_closes(ahead: int) -> None:
    """Without a last word of its own, and however far behind it was."""
    first, second, third = boards(3)
    for calls in (first, second, third):
        calls.post("step (a)")
    for _ in range(ahead):
        for calls in (first, third):
            calls.post("step (b)")
    reason = first.reason(CLOSED)
    assert reason is not None and "rank 0: step (b)" in reason and "rank 2: step (b)" in reason
    assert "rank 1: gone after 1 call\n" in reason
    assert third.reason(RuntimeError("anything")) == reason  # left there for the others


def test_an_error_of_this_ranks_own_is_not_blamed_on_one_that_is_slow() -> None:
    first, second = boards(2)
    for _ in range(2):
        first.post("step (a)")
    second.post("step (a)")
    assert first.reason(RuntimeError("out of memory")) is None


def test_another_call_is_the_reason_of_any_failure() -> None:
    first, second = boards(2)
    first.post("step (a)")
    second.post("forward (a)")
    reason = first.reason(RuntimeError("sizes differ"))
    assert reason is not None and "rank 0: step (a)\n  rank 1: forward (a)" in reason


def test_a_refusal_reaches_those_who_wait() -> None:
    first, second = boards(2)
    first.post("step (a)")
    with pytest.raises(RankError, match="A rank refused its call"):
        second.refuse("bad batch", known=())
    with pytest.raises(RankError, match="rank 1: refused: bad batch"):
        first.meet("step (a)")
