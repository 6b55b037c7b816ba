"""Lightning, peft and TRL, where they are installed, on two ranks: with this package as with FSDP2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "other_loops.py"
LOOPS = {"fabric": "lightning", "lightning_trainer": "lightning", "peft": "peft", "trl": "trl"}  # with what each needs


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_leaves_what_it_leaves_with_fsdp2(loop: str) -> None:
    if importlib.util.find_spec(LOOPS[loop]) is None:
        pytest.skip(f"{LOOPS[loop]} is not installed")
    found: dict[str, Any] = launch(WORKER, 2, loop)[loop]
    assert len(found["ours"]) > 4
    assert found["ours"] == found["FSDP2"]
