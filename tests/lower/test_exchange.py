"""Reduce-scatters over gloo are exchanged: the same sums, for half of what an all-reduce sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_compiled.lower.fusions.reductions import combine
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "exchange.py"


@pytest.mark.parametrize("world", [2, 3])
def test_an_exchange_and_a_sum_are_a_reduce_scatter(world: int) -> None:
    for answer in launch(WORKER, world):
        assert answer["others"] == [False, False, False, True]
        assert len(answer["cases"]) == 6
        for name, case in answer["cases"].items():
            assert case["sent"] == [["reduce_scatter_tensor"], ["all_to_all_single"]], name
            assert case["close"] and (case["the same bits"] or world > 2) and not case["wrong is close"], name
            assert case["untouched"] and case["own memory"], name


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("how", ["sum", "avg"])
def test_slices_are_added_up(world: int, how: str) -> None:
    rows = torch.randn(world, 7)
    expected = rows.sum(0) if how == "sum" else rows.mean(0)
    torch.testing.assert_close(combine(rows.flatten(), world, how), expected)
