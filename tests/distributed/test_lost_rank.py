"""A rank that dies, hangs or leaves, in any phase: the others end within a bounded time, and name it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.chosen import chosen, selected
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "lost_rank.py"
GONE, SILENT = r"Rank 1 \(process|rank 1: gone after", r"Rank 1 \(.*has given no sign of life"
NO_STORE = "The store at which ranks meet does not answer: torchrun's agent that holds it, or, without"
# How it ends, in which phase, on how many ranks -> what each of the others says. The watch's times are divided by 15.
CASES = {
    "killed/step/3": GONE,
    "stopped/step/2": SILENT,
    "killed/forward/2": GONE,
    "left/between/2": "rank 1: gone after 2 calls",
    "killed/meet/2": GONE,
    "killed/first/3": r"Rank 1.* is gone: its connections are closed",  # before a sign of life; silence tells nothing
    "killed/compile/3": GONE,
    "killed/save/2": GONE,
    "killed/writing/2": r"rank 1: it died or hangs",
    "stopped/writing/2": r"rank 1: it died or hangs",
    # Rank 0 holds the store, and is the one that dies.
    "killed/step/2/rank0": NO_STORE,
    "killed/step/3/rank0": NO_STORE,
    "killed/meet/3/rank0": NO_STORE,
    "killed/compile/2/rank0": NO_STORE,
    "stopped/meet/2/rank0": NO_STORE,  # its sockets are there, and nothing answers
}
# The same where a rank hears of no closed connection, since it waits for a GPU; and the store's process alone may die.
ON_A_DEVICE = {
    "killed/device/3": SILENT,
    "killed/device/2/rank0": NO_STORE,
    "killed/device/3/rank0": NO_STORE,
    "agent/device/2": NO_STORE,
    "agent/device/3": NO_STORE,
}
# On two ranks what is on three, too, of which the two that are left also wait for each other; and the store that dies
# with rank 0 is missed in the same way while ranks compile as in a step.
REPEATED = ("killed/step/2/rank0", "killed/compile/2/rank0", "killed/device/2/rank0", "agent/device/2")


def kept(cases: dict[str, str]) -> list[Any]:
    return chosen(cases, [case for case in cases if case not in REPEATED])


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(WORKER, 1, *selected(request, "case", "answers"), alone=True, timeout=500)


@pytest.mark.parametrize("case", kept(CASES))
def test_the_others_end_and_name_it(answers: dict[str, Any], case: str) -> None:
    answer = answers[case]
    assert answer["ended"], answer
    lost = 0 if case.endswith("rank0") else 1
    for rank, said in enumerate(answer["said"]):
        if rank != lost:
            told = json.loads(next(line for line in said.splitlines() if line.startswith('{"error"')))
            assert told["error"] in ("RankError", "SaveError", "StoreError"), told
            assert re.search(CASES[case], told["message"]), told
            assert f"ank {lost}" in told["message"] and "checkpoint" in told["message"]


@pytest.mark.parametrize("case", kept(ON_A_DEVICE))
def test_who_waits_for_a_device_ends_within_the_grace_and_says_why(answers: dict[str, Any], case: str) -> None:
    answer = answers[case]
    assert answer["ended"] and answer["seconds"] < 30, answer
    lost = None if case.startswith("agent") else 0 if case.endswith("rank0") else 1
    for rank, said in enumerate(answer["said"]):
        if rank != lost:
            assert answer["codes"][rank] == 1 and re.search(f"RankError: {ON_A_DEVICE[case]}", said), said
            assert f"Rank {rank} waits here:" in said and "time.sleep(10 * LIMIT)" in said
