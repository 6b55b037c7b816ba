"""The documents: what they name is there, what they show runs, and they say what the code says."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from fsdp_compiled import Policy, Sharded
from fsdp_compiled.capture import global_modes
from fsdp_compiled.distributed import device_mesh
from fsdp_compiled.distributed.mesh import ENDED
from fsdp_compiled.lower.fusions import FUSIONS
from fsdp_compiled.runtime import fsdp, module_buffers
from fsdp_compiled.runtime.fsdp.fully_shard import ELSEWHERE
from fsdp_compiled.runtime.fsdp.module_class import FSDPModule
from tests.reference_pages import DOCS, policy, reference
from tests.reference_pages import PAGES as PAGES_OF_DOCSTRINGS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "README.md")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINES = 170  # of the README, which one reads whole
REFUSING = {"ValueError", "NotImplementedError", "RuntimeError", "TypeError"}

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
    assert rows(text, "Fusions") == {*FUSIONS}
    assert rows(text, "Passes") == passes_of_the_package()


def passes_of_the_package() -> set[str]:
    import fsdp_compiled.passes as package

    named = {one.__name__ for one in (*package.FORWARD, *package.GRADIENT, *package.MICROBATCH, *package.OPTIONAL)}
    return {*named, *(one.__name__ for one in package.step((), added=()))}


def raised(source: str) -> list[str]:
    """The texts of errors that a person is told of; ``{}`` for what differs from one to another."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"

    calls = [node.exc for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.Raise)]
    return [text(call.args[0]) for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) in REFUSING]


def refusals_of_fully_shard() -> list[str]:
    """Those of its own files, and of what they import from elsewhere in the package."""
    modules = [importlib.import_module(one.name) for one in pkgutil.iter_modules(fsdp.__path__, f"{fsdp.__name__}.")]
    taken = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isfunction(value)
        and value.__module__.startswith("fsdp_compiled.")
        and not value.__module__.startswith(fsdp.__name__)
    }
    return [text for one in (*modules, *taken) for text in raised(inspect.getsource(one))]


def table_of_refusals() -> list[tuple[set[str], list[str]]]:
    """By row, the names of what is refused, and the words of the errors."""
    text = (DOCS / "fully_shard.md").read_text().split("\n## What is refused, by name\n")[1]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    assert all(len(row) == 4 for row in cells)
    return [(set(re.findall(r"`(\w+)`", row[0])), re.findall(r"`([^`]+)`", row[1])) for row in cells]


def missing(texts: list[str], words: list[str]) -> list[str]:
    return [text for text in texts if not any(one in text for one in words)]


def test_all_that_fully_shard_refuses_is_in_its_table_and_nothing_else() -> None:
    table = table_of_refusals()
    names, words = set().union(*(row[0] for row in table)), [one for row in table for one in row[1]]
    texts = refusals_of_fully_shard()
    assert len(texts) > 50 and not missing(texts, words)
    inside = [ENDED] + [
        text for module in (device_mesh, global_modes, module_buffers) for text in raised(inspect.getsource(module))
    ]
    assert not [one for one in words if not any(one in text for text in (*texts, *inside))]
    refusing = {name for name, one in vars(FSDPModule).items() if "_refusing" in getattr(one, "__qualname__", "")}
    assert refusing and refusing | set(ELSEWHERE) <= names
    assert missing(raised('def f(it):\n    raise ValueError(f"{it} is odd" " here")'), words) == ["{} is odd here"]
