"""Two real ranks: what one of them is refused, both are, with nothing changed; and a model's state is collected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parent / "workers" / "taken_over.py"
REFUSED = {"hook": "2.weight has a hook (register_hook)", "state": "The optimizer's state 'step' differs"}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return launch(WORKER, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_refuses_is_refused_by_all_before_anything_is_changed(results: dict[str, Any], case: str) -> None:
    first, second = results[case]
    assert second["error"].startswith(f"ValueError: {REFUSED[case]}")
    assert first["error"].startswith("RankError: rank 1 failed") and REFUSED[case] in first["error"]
    for answer in (first, second):
        assert answer["same"] and answer["finite"]


def test_a_state_dict_is_refused_on_every_rank_and_collected_on_rank_0(results: dict[str, Any]) -> None:
    for answer in results["saved"]:
        assert "Call sharded.full_state_dict() on every rank" in answer["error"] and answer["again"] == answer["error"]
        assert "Policy(clip=...)" in answer["clipped"]
    first, second = results["saved"]
    assert first["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"] and first["same"]
    assert second["names"] == []
