"""The README's example runs as it stands and prints what the README says it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in every if name == language]


def test_the_example_prints_the_plan_and_program_of_the_readme(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(_blocks("python")[0])
    shown = next(block for block in _blocks("") if block.startswith("plan:"))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed = iter(result.stdout.splitlines())
    for line in shown.splitlines():
        if line.strip() != "...":
            assert line in printed, f"not printed, or not in this order: {line!r}"


def test_every_file_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"`((?:tests|fsdp_compiled|bench|kernels)/[\w/.]+)`", README):
        assert (ROOT / name).exists(), name


def test_the_figures_are_those_of_the_committed_result() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "train.json").read_text())
    result = recorded["result"]
    row = (
        f"| {result['validation_loss']:.2f} nats/byte | {result['unigram_loss']:.2f} nats/byte "
        f"| {result['first_step_seconds']:.0f} s | {result['tokens_per_second']:,.0f} tokens/s "
        f"| {result['wall_seconds']:.0f} s |"
    )
    assert row in README
    assert recorded["hardware"].split(", ")[1] in README and recorded["versions"]["torch"] in README
