"""The documents: what they name is there, what they show runs, and they say what the code says."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from fsdp_compiled import Policy, Sharded
from fsdp_compiled.lower.fusions import FUSIONS
from tests.reference_pages import DOCS, policy, reference
from tests.reference_pages import PAGES as PAGES_OF_DOCSTRINGS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "README.md")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINES = 170  # of the README, which one reads whole

page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    folders = r"(?:tests|fsdp_compiled|bench|kernels|docs|\.ci)"
    for name in re.findall(rf"`({folders}/[\w/.-]*)`", page.read_text()):
        assert name.endswith(".tar.gz") or (ROOT / name).exists(), name  # an archive is what a script writes


@page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            found = page.parent / file if file else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found.read_text()), target


@page
def test_code_on_a_page_is_python_and_runs_where_it_says_so(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where what traces the code looks for it
    for language, code in FENCE.findall(page.read_text()):
        if language.startswith("python"):
            ast.parse(code)
        if language == "python run":
            exec(compile(code, str(page), "exec"), vars(module))


@pytest.mark.parametrize("name", PAGES_OF_DOCSTRINGS)
def test_a_page_of_docstrings_is_what_they_say(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES_OF_DOCSTRINGS[name](), "run: python -m tests.reference_pages --write"


def test_every_field_of_the_policy_and_every_call_is_described() -> None:
    described = re.findall(r"^## `(\w+) ", policy(), re.MULTILINE)
    assert described == [field.name for field in fields(Policy)]
    public = {name for name in dir(Sharded) if not name.startswith("_")}
    assert public <= set(re.findall(r"^### `(\w+)", reference(), re.MULTILINE))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in text, page.name


def rows(text: str, heading: str) -> set[str]:
    """The first cells of the table under a heading."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return {
        name for cell in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }


def test_every_pass_and_every_fusion_has_a_line() -> None:
    text = (ROOT / "docs" / "passes.md").read_text()
    assert rows(text, "Fusions") == {fusion.name for fusion in FUSIONS}
    assert rows(text, "Passes") == passes_of_the_package()


def passes_of_the_package() -> set[str]:
    import fsdp_compiled.passes as package

    named = {one.__name__ for one in (*package.FORWARD, *package.GRADIENT, *package.MICROBATCH, *package.OPTIONAL)}
    return {*named, *(one.__name__ for one in package.step((), added=()))}
