"""``with model.gathered():`` of a model of `fully_shard`: many evaluations, one gather, the numbers of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "gathered_loop.py"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(WORKER, 2)


def test_it_evaluates_as_fsdp2_does_and_changes_nothing(found: list[dict[str, Any]]) -> None:
    assert all(rank["same"] == [True, True] for rank in found)


def test_calls_inside_send_nothing(found: list[dict[str, Any]]) -> None:
    assert all(rank["sent"] == [] for rank in found)


def test_what_would_be_lost_or_stale_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        writing, stepping, training, nested, moved, same = rank["refused"]
        assert "written to while it was unsharded, which would be lost" in writing
        assert "written since they were gathered" in stepping and moved == "True"
        assert "with gradients inside of gathered()" in training
        assert "inside of gathered()" in nested
        assert same == "True"
