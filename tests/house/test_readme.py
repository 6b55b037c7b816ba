"""The README's example runs as it stands and prints what the README says it prints."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launch import launch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in every if name == language]


def test_the_example_prints_the_plan_and_program_of_the_readme(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(_blocks("python")[0])
    shown = next(block for block in _blocks("") if block.startswith("plan:"))
    printed = iter(launch(Path(__file__).parents[1] / "workers" / "printed.py", 2, str(script)))
    for line in shown.splitlines():
        if line.strip() != "...":
            assert line in printed, f"not printed, or not in this order: {line!r}"
