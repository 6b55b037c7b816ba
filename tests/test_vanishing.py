"""A rank that dies, hangs or leaves, in any phase: the others end within a bounded time, and name it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parent / "workers" / "vanishing.py"
GONE, SILENT = r"Rank 1 \(process|rank 1: gone after", r"Rank 1 \(.*has given no sign of life"
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
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return launch(WORKER, 1, *CASES, alone=True, timeout=500)


@pytest.mark.parametrize("case", CASES)
def test_the_others_end_and_name_it(answers: dict[str, Any], case: str) -> None:
    answer = answers[case]
    assert answer["ended"], answer
    for rank, said in enumerate(answer["said"]):
        if rank != 1:
            told = json.loads(said.splitlines()[-1])
            assert told["error"] in ("RankError", "SaveError") and re.search(CASES[case], told["message"]), told
            assert "ank 1" in told["message"] and "checkpoint" in told["message"]
