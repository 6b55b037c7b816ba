"""The simulated network: a collective takes as long as said, the process goes on meanwhile, values stay what they are.

Of times, what a busy machine makes longer has lower bounds only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch
from tests.workers.network import GIGABITS, KINDS, LATENCY, MESSAGE, SIZE

WORKER = Path(__file__).parents[1] / "workers" / "network.py"


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return launch(WORKER, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_takes_as_long_as_its_bytes(kind: str, seen: dict[str, Any]) -> None:
    one = seen["timed"][kind]
    halves = 2 if "all_reduce" in kind else 1
    assert one["size"] == halves * SIZE * 4 // 2
    assert one["said"] == pytest.approx(LATENCY + one["size"] / (GIGABITS * 1e9 / 8))
    assert one["whole"] >= one["said"] > 0.03
    assert one["equal"]


@pytest.mark.parametrize("kind", KINDS)
def test_issuing_returns_before_the_transfer_ends_and_waiting_sleeps(kind: str, seen: dict[str, Any]) -> None:
    one = seen["timed"][kind]
    assert one["issuing"] < one["said"], "the process did not go on while the transfer ran"
    assert one["cpu while waiting"] < one["said"] / 2


def test_work_between_issue_and_wait_hides_the_transfer(seen: dict[str, Any]) -> None:
    none, some, much = (seen["exposed"][key] for key in ("0.0", "0.1", "0.5"))
    assert 0 < none <= seen["alone"]
    assert some <= seen["alone"] - 0.1
    assert much == 0


def test_transfers_queue_on_one_wire(seen: dict[str, Any]) -> None:
    assert seen["queued"] == pytest.approx([seen["alone"] * number for number in (1, 2, 3)], rel=1e-3)


@pytest.mark.parametrize("by", ["ours", "fsdp2", "ddp"])
def test_every_rival_is_on_the_wire_and_trains_the_same(by: str, seen: dict[str, Any]) -> None:
    (losses, _), (slow, transfers) = seen["trained"][by]
    assert losses == slow and losses[0] != losses[-1]
    if by == "ddp":
        assert transfers == ["allreduce"]
    else:
        assert sum("allgather" in name for name in transfers) >= 1
        assert sum("reduce_scatter" in name for name in transfers) >= 1


def test_a_policy_that_measures_the_network_goes_by_what_all_ranks_found(seen: dict[str, Any]) -> None:
    (rate, milliseconds), (note,), latency = seen["measured"]
    assert 0.5 * GIGABITS <= rate <= 1.01 * GIGABITS and milliseconds >= MESSAGE * 1e3
    assert note == f"network: measured, {rate:g} Gbit/s and {milliseconds:g} ms a message"
    assert latency == pytest.approx(milliseconds / 1e3)
    rate, (note,), _ = seen["usual"]  # whatever else runs on this host
    assert (rate is None) == (note == "network: measured, about as such devices usually have")
    assert rate is None or rate[0] > 2 * GIGABITS
    for _, error in seen["apart"]:
        assert "What compile_sharded was called with differs" in error


def test_afterwards_the_network_is_as_before(seen: dict[str, Any]) -> None:
    assert seen["after"] == 0


def test_a_spared_group_is_not_on_the_wire(seen: dict[str, Any]) -> None:
    assert seen["not spared"] == [["broadcast", 12]]
