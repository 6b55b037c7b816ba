"""Batches of different ranks that reach different parameters: the mean gradient, or an error on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chosen import chosen
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "reached_parameters.py"
WHICH = ("alike", "images", "heads", "turns", "lengths", "results")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(WORKER, 3, *WHICH, "accumulated")


@pytest.mark.parametrize("which", [*WHICH, "accumulated"])
def test_with_zeros_for_what_a_rank_does_not_reach_it_is_the_mean(found: list[dict[str, Any]], which: str) -> None:
    assert all(rank[which][0] <= 1e-6 for rank in found)


def test_what_no_rank_reaches_is_left_alone(found: list[dict[str, Any]]) -> None:
    assert all(rank["without"] <= 1e-6 for rank in found)


@pytest.mark.parametrize("which", chosen(WHICH[1:], ("images", "turns", "results")))
def test_without_it_is_an_error_on_every_rank(which: str) -> None:
    said = launch(WORKER, 3, "refused", which)
    assert all(one.startswith("RankError") and "set_reduce_scatter_unused_params(True)" in one for one in said), said
    assert all("Its batch reached no " in one for one in said)
