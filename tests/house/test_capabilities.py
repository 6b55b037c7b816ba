"""Every test that docs/guarantees.md names by a link exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
LINK = re.compile(r"\[([^\]]+)\]\(\.\./(tests/[^)]+\.py)\)")  # the functions, each in `backticks`, and the file


def absent(text: str) -> list[str]:
    """The tests that links of this text name and that are not there."""
    return [
        f"{file}::{function}"
        for functions, file in LINK.findall(text)
        for function in re.findall(r"`(\w+)`", functions)
        if function not in functions_in(ROOT / file)
    ]


def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_table_of_capabilities_names_exists() -> None:
    table = PAGE.read_text().split("## Next to FSDP2 and DDP")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) >= 40 and all(LINK.search(row) for row in rows)
    assert absent(table) == []


def test_links_to_no_file_and_to_no_test_are_found() -> None:
    assert absent("[`test_x`](../tests/test_gone.py)") == ["tests/test_gone.py::test_x"]
    here = "tests/house/test_capabilities.py"
    assert absent(f"[`test_gone`, `{test_links_to_no_file_and_to_no_test_are_found.__name__}`](../{here})") == [
        f"{here}::test_gone"
    ]
