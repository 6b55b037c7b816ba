"""The releases of PyTorch that are tested are those that are promised; what the page of versions says of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import versions

ROOT = versions.ROOT
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[x]" time="1"/>
<testcase classname="tests.test_a" name="test_two"><skipped message="traced from 2.13 on"/></testcase>
<testcase classname="tests.test_a" name="test_three"><failure message="no">no</failure></testcase>
<testcase classname="tests.test_b" name="test_four"><error message="no">no</error></testcase>
</testsuite></testsuites>"""


def test_what_is_tested_is_what_is_promised() -> None:
    tested = re.search(r"^VERSIONS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tested is not None
    releases = [tuple(map(int, release.split(".")[:2])) for release in tested[1].split()]
    low, high = re.findall(r'"torch>=(\d+\.\d+),<(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    first, beyond = (tuple(map(int, one.split("."))) for one in (low, high))
    assert releases == [(2, minor) for minor in range(first[1], beyond[1])]
    named = [f"{major}.{minor}" for major, minor in releases]
    assert f"torch {', '.join(named[:-1])} or {named[-1]}," in (ROOT / "README.md").read_text()
    setup = (ROOT / ".ci" / "setup").read_text()
    assert all(f"torch=={one}.*" in setup for one in named), "for its Triton"
    assert f"({first[0]}, {first[1]}) <=" in setup and f"< ({beyond[0]}, {beyond[1]})" in setup


def test_the_page_counts_and_names_what_did_not_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    counts, skipped, failed = versions.read(report)
    assert counts == {"passed": 1, "skipped": 1, "failed": 2}
    assert failed == ("test_a::test_three", "test_b::test_four")
    said = ("make test-versions", "abc", "2 cores")
    one = versions.Suite(("2.11.0", "3.6.0", "3.11.2"), counts, skipped, failed, 90.0, *said)
    other = versions.Suite(("2.13.0", "3.7.1", "3.11.2"), {"passed": 4}, {}, (), 60.0, *said)
    text = versions.page([one, other])
    assert (
        "| 2.11.0 | 3.6.0 | 3.11.2 | 1 | 1 | 2 | 1.5 | abc |\n| 2.13.0 | 3.7.1 | 3.11.2 | 4 | 0 | 0 | 1.0 | abc |"
        in text
    )
    assert text.count("`make test-versions`, 2 cores") == 1
    assert "- On 2.11.0 failed: `test_b::test_four`" in text
    assert "- On 2.11.0 left out: `test_a::test_two` (traced from 2.13 on)" in text
    assert "left out" not in versions.page([one, one]), "on all of them"


def test_results_are_read_as_they_were_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    one = versions.Suite(("2.11.0", "3.6.0", "3.11.2"), *versions.read(report), 90.0, "make", "abc", "2 cores")
    versions.keep({"2.11.0": one})
    assert versions.page(versions.recorded().values()) == versions.page([one])


def test_the_page_is_written_from_the_results() -> None:
    assert not versions.recorded() or versions.PAGE.read_text() == versions.page(versions.recorded().values())
