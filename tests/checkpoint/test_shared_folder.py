"""One host compiles for all hosts where they share the cache folder; real ranks, of which one is slow or dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "shared_folder.py"
VICTIM = 1


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return launch(WORKER, 1, alone=True, timeout=500)


def told(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert answer["ended"] and answer["codes"] == [0] * 2, answer
    return [json.loads(lines[0]) for lines in answer["said"]]


@pytest.mark.parametrize("case", ["slow", "after"])
def test_each_piece_is_compiled_by_one_rank_of_all_hosts(answers: dict[str, Any], case: str) -> None:
    """With one that is slow, for which the others wait; and in the folder that one left that died in its midst."""
    found = told(answers[case])
    pieces = [one.get("pieces", 0) for one in found]
    if case == "slow":
        assert max(pieces) - min(pieces) <= 1 and min(pieces) > 0  # dealt out over both hosts
        assert [one.get("libraries") for one in found] == [1] * 2  # a unit each: no kernel is compiled twice
    for one in found:
        assert one["losses"] == pytest.approx(found[0]["losses"], rel=0)
        assert one["losses"] == pytest.approx(one["plain"], rel=1e-5)
        assert one["losses"] != pytest.approx([loss * 1.001 for loss in one["plain"]], rel=1e-5)


def test_where_one_dies_while_it_compiles_the_others_end_and_name_it(answers: dict[str, Any]) -> None:
    answer = answers["killed"]
    assert answer["ended"] and answer["codes"][VICTIM] == -9
    for rank in range(VICTIM):
        (error,) = answer["said"][rank]
        assert "RankError" in error and "ank 1" in error, error
