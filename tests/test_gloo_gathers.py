"""No program sends the all-gather of gloo's whose name is too long, which corrupts memory; values are the same, also of
what two ranks reduce by an exchange."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

WORKER = Path(__file__).parent / "workers" / "gloo_gathers.py"
SHORT = 15  # letters that a C++ string holds without memory of its own


# 12 gathers, of which between two ranks those of something are exchanges.
SENT = {2: {"c10d::_allgather_base_": 4, "c10d::alltoall_base_": 8}, 3: {"c10d::_allgather_base_": 12}}


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_over_gloo_go_by_a_short_name_and_are_right(world: int) -> None:
    for answer in launch(WORKER, world):
        assert answer["before"] == {"c10d::allgather_into_tensor_coalesced_": 7}  # the control: PyTorch's own
        assert answer["sent"] == SENT[world]
        assert max(map(len, ("_ALLGATHER_BASE", "ALLTOALL_BASE"))) <= SHORT < len("ALLGATHER_COALESCED")
        assert len(answer["same"]) == 12 and all(answer["same"]) and not answer["wrong is same"]
        assert answer["dtensor"]
        # Reductions: gloo's own, bit for bit; between two ranks those of flat buffers of real numbers are exchanges.
        assert len(answer["reduced"]) == 20 and (all(answer["reduced"]) or world > 2)
        assert answer["exchanged"] == (18 if world == 2 else 0) and answer["left"] == 0 and not answer["other reduced"]
        if world == 2:
            assert answer["unpadded"] == [True] * 12 and answer["less is sent"] == [True] * 4
            assert not answer["less is the same"]
