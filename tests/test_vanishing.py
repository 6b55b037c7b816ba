"""A rank that dies, hangs or leaves, in any phase: the others end within a bounded time, and name it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
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
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = tmp_path_factory.mktemp("vanishing") / "result.json"
    worker = ROOT / "tests" / "workers" / "vanishing.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(worker), str(result), *CASES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_others_end_and_name_it(answers: dict[str, Any], case: str) -> None:
    answer = answers[case]
    assert answer["ended"], answer
    for rank, said in enumerate(answer["said"]):
        if rank != 1:
            told = json.loads(said.splitlines()[-1])
            assert told["error"] in ("RankError", "SaveError") and re.search(CASES[case], told["message"]), told
            assert "ank 1" in told["message"] and "checkpoint" in told["message"]
