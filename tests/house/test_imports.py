"""Who may import whom, read off the source."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

import fsdp_compiled
from fsdp_compiled.torch_private import names

ROOT = Path(fsdp_compiled.__file__).parent
PACKAGE = ROOT.name

# Surfaces that move from release to release and are not in the table of private names, and the one file that reaches
# each. What is in the table is looked up by `names.find`.
PRIVATE = {
    "accelerate": "integrations.accelerate",
    "torch.compiler._is_compiling_flag": "optim.tracing",  # in the table, and set
    "torch.testing._internal": "runtime.simulate",  # or without it
}
# Graphs are made in one file.
GRAPHS = ("torch.cuda.CUDAGraph", "torch.cuda.graph")
MAKE_GRAPHS = ("lower.cuda_device",)
# Underscores that are no surface of their own: the words that graphs are written in, and functions that PyTorch's own
# documents, or the message of an error, name to users.
WORDS = (
    "torch._ops", "torch._subclasses", "torch.utils._pytree", "torch.ops._c10d_functional", "torch.ops.aten",
    "torch.Tensor._make_wrapper_subclass", "torch.utils._python_dispatch.TorchDispatchMode",
)  # fmt: skip
# The rooms from the ground up: each imports only what stands above it here, and its own. The top floor is the public
# face: what a person imports and the shell commands.
ROOMS = (
    "torch_private", "policy", "plan", "ir", "kernels", "distributed", "optim", "analysis", "capture", "report",
    "passes", "lower", "runtime",
)  # fmt: skip
FACE = ("__init__", "__main__", "api", "cli", "integrations")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@pytest.fixture(scope="module", autouse=True)
def code_is_parsed_once() -> Iterator[None]:
    yield
    for cached in (parsed, imported, dotted):
        cached.cache_clear()


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Each module's name inside the package, and its code; kernels/ stands on its own."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "kernels":
            yield ".".join(parts), parsed(path)


@functools.cache
def imported(tree: ast.AST, name: str) -> set[str]:
    """Every module or member that this code of the module ``name`` imports, with its full name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            around = [PACKAGE, *name.split(".")][: -node.level] if node.level else []
            start = ".".join([*around, node.module] if node.module else around)
            found |= {f"{start}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def dotted(tree: ast.AST) -> set[str]:
    """Names as they are used: ``torch._inductor.standalone_compile``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and parts:
            found.add(".".join([node.id, *reversed(parts)]))
    return found


def ours(names: set[str]) -> set[str]:
    """The modules of this package among them: ``passes.gather`` for ``fsdp_compiled.passes.gather.gather``."""
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        inner = parts[1:]
        while inner and not (ROOT.joinpath(*inner).is_dir() or ROOT.joinpath(*inner).with_suffix(".py").is_file()):
            inner = inner[:-1]
        found.add(".".join(inner) or "__init__")
    return found


def from_tests(tree: ast.Module) -> set[str]:
    """The files of tests that this code of tests/ imports from."""
    return {
        part
        for name in imported(tree, "")
        for part in name.split(".")[1:3]
        if name.startswith("tests.") and part.startswith("test_")
    }


def problems(name: str, tree: ast.Module) -> list[str]:
    """What this module does that it may not."""
    everything = imported(tree, name)
    mine = ours(everything)
    room = name.split(".")[0]
    found = [] if room in (*ROOMS, *FACE) else [f"{name} is in no room"]
    if room in ROOMS:
        above = ROOMS[: ROOMS.index(room) + 1]
        found += [f"{name} imports {other}" for other in sorted(mine) if other.split(".")[0] not in above]
    if room == "passes" and name != "passes.__init__":
        found += [f"{name} imports {other}" for other in sorted(mine) if other.startswith("passes")]
        found += [f"{name} imports {other}" for other in sorted(mine) if other.split(".")[0] == "distributed"]
    if name.startswith("runtime.programs"):
        rooms = ("runtime.fsdp.", "runtime.parameters.", "runtime.sharded", "runtime.tensor_parallel.")
        found += [f"{name} imports {other}" for other in sorted(mine) if other.startswith(rooms)]
    if room != "integrations":  # whose frameworks are not everybody's
        found += [f"{name} imports {other}" for other in sorted(mine) if other.split(".")[0] == "integrations"]
    used = everything | dotted(tree)
    for use in sorted(used):
        owner = owner_of(use)
        if owner not in (None, name, room) or (within(use, GRAPHS) and name not in MAKE_GRAPHS):
            found.append(f"{name} uses {use}")
    return found


def within(use: str, surfaces: Iterable[str]) -> bool:
    return any(f"{use}.".startswith(f"{surface}.") for surface in surfaces)


def owner_of(use: str) -> str | None:
    """The one file or room that may reach this, None where all may; what is private and not in a table, nobody may."""
    if within(use, WORDS) or hasattr(torch._C._VariableFunctions, use.removeprefix("torch.")):  # `torch._foreach_add_`
        return None
    for surface, owner in PRIVATE.items():
        if within(use, [surface]):
            return owner
    if use in names.NAMES or (use.startswith("torch._") and any(one.startswith(f"{use}.") for one in names.NAMES)):
        return "torch_private"
    private = any(part.startswith("_") and part[1:2] != "_" for part in use.split("."))
    return "nobody" if private and use.startswith("torch.") else None


def test_no_module_imports_what_it_may_not() -> None:
    found = [problem for name, tree in sources() for problem in problems(name, tree)]
    assert not found, "\n".join(found)


def test_every_private_surface_is_used_where_it_is_allowed() -> None:
    """Else the rule guards nothing, and may go."""
    uses = {name: imported(tree, name) | dotted(tree) for name, tree in sources()}
    for surface, owner in PRIVATE.items():
        assert any(within(use, [surface]) for use in uses[owner]), f"{owner} does not use {surface}"
    for surface in (*GRAPHS, *WORDS):
        assert any(within(use, [surface]) for found in uses.values() for use in found), f"nobody uses {surface}"


def test_every_name_in_the_table_is_used_and_the_core_is_small() -> None:
    """A file says the last part of it, as an attribute or in a text, or takes all of a row."""
    said = " ".join(path.read_text() for path in ROOT.rglob("*.py") if path.name != "names.py")
    words = set(re.findall(r"\w+", said))
    for use, (_, found, _) in names.TABLE.items():
        taken = f'TABLE["{use}"]' in said
        unused = [name for name in found if not taken and not {*re.split(r"[.|?]", name)[-1:]} & words]
        assert not [name for name in unused if not name.endswith("?")], use
    core = [name for use in names.TABLE.values() if use.kind == "core" for name in use.names]
    assert len(core) == len(set(core)) <= 20
    assert all(use in names.TABLE for use in names.FAST)


def test_what_is_not_in_the_table_cannot_be_looked_up() -> None:
    with pytest.raises(KeyError, match="not in the table"):
        names.find("torch._dynamo.reset")


def test_the_releases_in_the_table_are_those_that_are_promised() -> None:
    said = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    first, last = names.TESTED[0], names.TESTED[-1]
    major, minor = map(int, last.split("."))
    assert f"torch>={first},<{major}.{minor + 1}" in said
    assert list(names.TESTED) == [f"2.{number}" for number in range(int(first.split(".")[1]), minor + 1)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("passes.reduce", "from fsdp_compiled.passes.gather import gather"),
        ("passes.reduce", "from fsdp_compiled.passes import gather"),
        ("passes.reduce", "import fsdp_compiled.passes.gather"),
        ("passes.reduce", "from .gather import gather"),
        ("passes.reduce", "from . import gather"),
        ("plan.units", "from ..ir import program"),
        ("passes.reduce", "from fsdp_compiled.distributed.mesh import Mesh"),
        ("plan.plan", "from fsdp_compiled.ir import program"),
        ("plan.plan", "from fsdp_compiled.ir.program import Port"),
        ("plan.plan", "def late():\n    from fsdp_compiled.ir.program import Port"),
        ("ir.program", "from fsdp_compiled.analysis import dump"),
        ("capture.dynamo", "from fsdp_compiled import passes"),
        ("lower.lowering", "from fsdp_compiled.api import compile_sharded"),
        ("attic", "import torch"),
        ("runtime.programs.program_cache", "from fsdp_compiled.runtime.fsdp.gradients import leave"),
        ("runtime.sharded", "from torch._dynamo import reset"),
        ("runtime.sharded", "import torch._inductor.config"),
        ("runtime.sharded", "import torch\ntorch._functorch.config.x = 1"),
        ("capture.dynamo", "from torch._dynamo import reset"),
        ("lower.lowering", "from torch import _dynamo"),
        ("ir.nodes", "import torch\ntorch._prims.mul"),
        ("torch_private.dynamo", "from fsdp_compiled.policy import Policy"),
        ("lower.lowering", "import torch\ntorch._inductor.standalone_compile"),
        ("runtime.sharded", "import torch\nwith torch.cuda.graph(made): pass"),
        ("runtime.rng", "from torch.cuda import CUDAGraph"),
        ("cli.train", "from fsdp_compiled.integrations.accelerate import use_fully_shard"),
        ("runtime.fsdp.module_class", "import accelerate"),
    ],
)
def test_a_forbidden_import_is_noticed(name: str, code: str) -> None:
    assert problems(name, ast.parse(code))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ir.program", "def late():\n    from fsdp_compiled.ir.text import summary"),
        ("passes.update", "from fsdp_compiled.optim.rule import Rule"),
        ("passes.__init__", "from fsdp_compiled.passes.gather import gather"),
        ("torch_private.dynamo", "from torch._dynamo.variables import LazyVariableTracker"),
        ("torch_private.inductor", "import torch\ntorch._inductor.standalone_compile"),
        ("lower.inductor", "from fsdp_compiled.torch_private.inductor import config"),
        ("ir.nodes", "import torch\ntorch._ops.OpOverload"),
        ("cli.train", "from fsdp_compiled.runtime.sharded import Sharded"),
    ],
)
def test_an_allowed_import_is_allowed(name: str, code: str) -> None:
    assert not problems(name, ast.parse(code))


def test_no_test_imports_from_another() -> None:
    """What two of them need is a toy, and has a place of its own (tests/README.md)."""
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        assert not (found := from_tests(parsed(path))), f"{path.name} imports {found}"


@pytest.mark.parametrize(
    "code",
    [
        "from tests.api.test_api import Net",
        "from tests.api import test_api",
        "import tests.api.test_api",
        "import tests.api.test_api as api",
    ],
)
def test_an_import_from_another_test_is_noticed(code: str) -> None:
    assert from_tests(ast.parse(code)) == {"test_api"}


# A new pass, or a new fusion, is one file, its test, and one entry. What another part would have to know of it is in
# the program: ports, marks, history.
TABLES = {"passes": "passes.__init__", "lower.fusions": "lower.fusions.__init__"}


def known_by() -> dict[str, set[str]]:
    """Who imports each module of the rooms of passes."""
    found: dict[str, set[str]] = {}
    for name, tree in sources():
        for full in imported(tree, name):
            inner = full.removeprefix(f"{PACKAGE}.")
            for room in TABLES:
                module = ".".join(inner.split(".")[: room.count(".") + 2])
                if inner.startswith(f"{room}.") and (ROOT / f"{module.replace('.', '/')}.py").is_file():
                    found.setdefault(module, set()).add(name)
    return found


def test_one_table_knows_each_pass_and_each_fusion() -> None:
    found = known_by()
    assert len(found) > 20
    for module, who in found.items():
        room = next(room for room in TABLES if module.startswith(f"{room}."))
        assert who == {TABLES[room]}, module


# Names that modules once had, and that only their author could place.
OLD = {"keep", "holdings", "rates", "pieces", "watch", "remake", "home", "binding", "scratch", "cost", "settle"}


def test_no_module_is_named_as_before_or_as_one_of_pythons_own() -> None:
    named = {name.split(".")[-1] for name, _ in sources()} | {path.stem for path in (ROOT / "kernels").glob("*.py")}
    assert not named & OLD
    assert not (named - {"__main__"}) & sys.stdlib_module_names


def test_nothing_of_a_module_is_named_as_before() -> None:
    for name, tree in sources():
        defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
        assert not {one.strip("_").lower() for one in defined} & (OLD - {"pieces"}), name


# Words that had several meanings, or one that only their author knew.
WORDS_OF_OLD = {"holdings", "home", "homes", "remake", "scratch", "settle", "settled", "settles", "sever", "severed"}


def words_of(tree: ast.AST) -> set[str]:
    """The parts of every name that this code gives or uses."""
    names: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            if isinstance(name := getattr(node, field, None), str):
                names.add(name)
    return {word for name in names for word in name.lower().split("_")}


def test_the_old_words_are_in_no_name() -> None:
    paths = [*sorted(Path(__file__).parents[1].rglob("*.py")), *(ROOT / "kernels").glob("*.py")]
    trees = dict(sources()) | {str(path): parsed(path) for path in paths}
    assert not {name: found for name, tree in trees.items() if (found := words_of(tree) & WORDS_OF_OLD)}
    assert words_of(ast.parse("def _homes(x): return x.settle")) & WORDS_OF_OLD == {"homes", "settle"}  # the control


def test_the_package_names_what_it_imports_later() -> None:
    """What type checkers read in `fsdp_compiled/__init__.py`, and where each name is looked for."""
    (names,) = [node for node in parsed(ROOT / "__init__.py").body if isinstance(node, ast.If)]
    read = {(alias.name, one.module) for one in names.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    assert read == {(name, f"{PACKAGE}.{module}") for name, module in fsdp_compiled._MODULES.items()}
    assert all(hasattr(fsdp_compiled, name) for name in fsdp_compiled.__all__) and not hasattr(fsdp_compiled, "shard")


def test_the_package_by_itself_and_a_listing_import_no_torch() -> None:
    code = "import sys, fsdp_compiled, fsdp_compiled.cli; assert 'torch' not in sys.modules; fsdp_compiled.Policy; "
    code += "from fsdp_compiled import fully_shard; assert callable(fully_shard) and 'torch' in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


ALONE = """
import sys

sys.modules.update(dict.fromkeys(NAMES))  # as if not installed
import torch
from fsdp_compiled import Policy, compile_sharded, fully_shard

for face in (0, 1):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 4)
    if face:
        sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).sum(), policy=Policy(lower="eager"))
        assert sharded.step(x).isfinite() and "peak" in str(sharded.program)
        sharded.save(FOLDER, wait=True)
        sharded.load(FOLDER)
    else:
        fully_shard(model, policy=Policy(lower="eager"))
        model(x).sum().backward()
        optimizer.step()
"""


def test_it_trains_with_nothing_installed_but_its_dependencies(tmp_path: Path) -> None:
    names = ["numpy", "transformers", "matplotlib", "rich", "tensorboard", "accelerate", "hypothesis", "pytest"]
    code = ALONE.replace("NAMES", repr(names)).replace("FOLDER", repr(str(tmp_path / "run")))
    subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", code], check=True)
