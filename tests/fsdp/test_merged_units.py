"""Small neighbours among the modules that were marked with `fully_shard` are sent as one, and seen one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "merged_units.py"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(WORKER, 2)


def test_what_is_sent(found: list[dict[str, Any]]) -> None:
    for rank in found:
        (merged, apart, fsdp2), units, by_module, compiled, reason = rank["collectives"]
        assert (apart, fsdp2) == (3 * 6 + 1, 3 * 6 + 2), rank["collectives"]  # of 6 blocks; the root is read once
        early = ["layers.0", *(f"layers.{first}-{first + 1}" for first in range(1, 11, 2))]  # of 24
        assert units == ["root", *early, *(f"layers.{one}" for one in range(11, 24))]
        assert merged == 3 * 19 + 1, rank["collectives"]
        assert compiled == [1, *[4] * 6]  # what Inductor keeps leaves room for larger ones, to the end
        assert by_module == ["root", *(f"layers.{one}" for one in range(6))]
        assert reason.startswith("chosen: bucket_mb=") and "no more than 1/12 of the model, in the first half" in reason


def test_numbers_are_the_same(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["numbers"] == [True, True, False]


def test_local_tensors_stay_the_parameters(found: list[dict[str, Any]]) -> None:
    assert all(rank["local_tensors"] for rank in found)


def test_a_write_to_what_backward_does_not_read_is_none_to_its_neighbours(found: list[dict[str, Any]]) -> None:
    for rank in found:
        names, *fine, refused = rank["writes"]
        assert "layers.2-3" in names
        assert fine == ["nothing", "nothing"]
        assert "layers.3" in refused and "modified by an inplace operation" in refused


def test_modules_that_are_treated_in_another_way_are_apart(found: list[dict[str, Any]]) -> None:
    for rank in found:
        kept, frozen, without = rank["treated_apart"]
        assert "layers.3" in kept and "layers.5" in frozen and "layers.3" not in frozen
        assert all(without)


def test_a_module_that_is_called_by_itself(found: list[dict[str, Any]]) -> None:
    for rank in found:
        names, same = rank["alone"]
        assert names == ["root"] and same


def test_one_module_is_unsharded_and_replaced(found: list[dict[str, Any]]) -> None:
    for rank in found:
        kinds, units = rank["whole"]
        assert kinds == ["DTensor", "Parameter", "DTensor"] or kinds[0] == kinds[2] != kinds[1], kinds
        assert units == ["root", "layers.0-1", "layers.2-3", "layers.4-5"]
