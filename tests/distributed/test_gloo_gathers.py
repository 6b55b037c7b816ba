"""No program sends the all-gather of gloo's whose name is too long, which corrupts memory; values are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "gloo_gathers.py"
SHORT = 15  # letters that a C++ string holds without memory of its own


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_over_gloo_go_by_a_short_name_and_are_right(world: int) -> None:
    for answer in launch(WORKER, world):
        assert answer["before"] == {"c10d::allgather_into_tensor_coalesced_": 7}  # the control: PyTorch's own
        assert answer["sent"] == {"c10d::_allgather_base_": 12}
        assert len("_ALLGATHER_BASE") <= SHORT < len("ALLGATHER_COALESCED")
        assert len(answer["same"]) == 12 and all(answer["same"]) and not answer["wrong is same"]
        assert answer["dtensor"]
