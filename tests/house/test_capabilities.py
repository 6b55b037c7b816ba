"""The table of capabilities in docs/guarantees.md is what its rows make, and every test that it names exists."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.capabilities import BEGIN, PAGE, ROOT, ROWS, passed, path_of, proven, replaced, table


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.capability)
def test_every_test_that_a_row_names_exists(row: object) -> None:
    for file, function in map(path_of, row.tests):  # type: ignore[attr-defined]
        assert function in functions(file), f"{file}::{function}"


def test_the_table_of_the_page_is_the_one_that_the_rows_make() -> None:
    text = PAGE.read_text()
    assert table(ROWS) in text, "python tests/capabilities.py --write"
    assert text.count(BEGIN) == 1
    assert replaced(text, table(ROWS)) == text


def test_a_row_is_written_only_where_all_of_its_tests_ran_and_passed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.test_a" name="test_good[one]"/>
        <testcase classname="tests.test_a" name="test_good[two]"/>
        <testcase classname="tests.test_a" name="test_mixed[one]"/>
        <testcase classname="tests.test_a" name="test_mixed[two]"><failure/></testcase>
        <testcase classname="tests.test_a" name="test_skipped"><skipped/></testcase>
        </testsuite></testsuites>"""
    )
    good = passed(report)
    assert good == {"test_a::test_good"}
    shown = replace(ROWS[0], tests=("test_a::test_good",))
    rows = [
        shown,
        *(
            replace(ROWS[0], tests=("test_a::test_good", f"test_a::{name}"))
            for name in ("test_mixed", "test_skipped", "test_absent")
        ),
    ]
    assert proven(rows, good) == [shown]
