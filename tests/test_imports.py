"""Who may import whom, read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_compiled

ROOT = Path(fsdp_compiled.__file__).parent
PACKAGE = ROOT.name

# Surfaces of PyTorch that move from release to release, and the one file that moves with each.
PRIVATE = {
    "torch._dynamo": {"capture", "joint"},
    "torch._functorch": {"joint", "settings"},
    "torch._inductor": {"inductor", "probes"},
    "torch.cuda.CUDAGraph": {"replay"},
    "torch.cuda.graph": {"replay"},
    "torch.cuda.graph_pool_handle": {"replay"},
    "torch._C": {"capture", "cli.bench.network", "lower", "replay", "settings"},
}
# What the rest stands on, and what of ours each may import.
FOUNDATIONS: dict[str, set[str]] = {
    "policy": set(),
    "machine": set(),
    "units": set(),
    "bucket": {"machine", "units"},
    "plan": {"bucket", "machine", "policy"},
    "program": set(),
}
# `str(program)` shows the summary that `dump` writes; imported when it is asked for.
LATE = {("program", "dump")}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Each module's name inside the package, and its code; kernels/ stands on its own."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "kernels":
            yield ".".join(parts), ast.parse(path.read_text(), str(path))


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


def dotted(tree: ast.AST) -> Iterator[str]:
    """Names as they are used: ``torch._inductor.standalone_compile``."""
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and parts:
            yield ".".join([node.id, *reversed(parts)])


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


def problems(name: str, tree: ast.Module) -> list[str]:
    """What this module does that it may not."""
    everything = imported(tree, name)
    mine = ours(everything)
    found = []
    if name in FOUNDATIONS:
        late = {other for other in mine if (name, other) in LATE}
        mine -= FOUNDATIONS[name]
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        found += [
            f"{name} imports {other}" for other in sorted((mine - late) | ours(imported(top, name)) - FOUNDATIONS[name])
        ]
    if name.startswith("passes.") and name != "passes.__init__":
        found += [f"{name} imports {other}" for other in sorted(mine) if other.split(".")[0] == "passes"]
        found += [f"{name} imports {other}" for other in sorted(mine) if other in ("lower", "step", "api", "mesh")]
    used = everything | set(dotted(tree))
    for surface, allowed in PRIVATE.items():
        if name not in allowed:
            found += [f"{name} uses {use}" for use in sorted(used) if f"{use}.".startswith(f"{surface}.")]
    return found


def test_no_module_imports_what_it_may_not() -> None:
    found = [problem for name, tree in sources() for problem in problems(name, tree)]
    assert not found, "\n".join(found)


def test_every_private_surface_is_used_where_it_is_allowed() -> None:
    """Else the rule guards nothing, and may go."""
    trees = dict(sources())
    for surface, allowed in PRIVATE.items():
        for name in allowed:
            used = imported(trees[name], name) | set(dotted(trees[name]))
            assert any(f"{use}.".startswith(f"{surface}.") for use in used), f"{name} does not use {surface}"
    for name, other in LATE:
        assert other in ours(imported(trees[name], name))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("passes.reduce", "from fsdp_compiled.passes.gather import gather"),
        ("passes.reduce", "from fsdp_compiled.passes import gather"),
        ("passes.reduce", "import fsdp_compiled.passes.gather"),
        ("passes.reduce", "from .gather import gather"),
        ("passes.reduce", "from . import gather"),
        ("plan", "from . import program"),
        ("passes.reduce", "from fsdp_compiled.mesh import Mesh"),
        ("plan", "from fsdp_compiled.program import Port"),
        ("plan", "def late():\n    from fsdp_compiled.program import Port"),
        ("program", "from fsdp_compiled import dump"),
        ("program", "def late():\n    from fsdp_compiled.plan import Plan"),
        ("step", "from torch._dynamo import reset"),
        ("step", "import torch._inductor.config"),
        ("step", "import torch\ntorch._functorch.config.x = 1"),
        ("lower", "from torch import _dynamo"),
        ("lower", "import torch\ntorch._inductor.standalone_compile"),
        ("step", "import torch\nwith torch.cuda.graph(made): pass"),
        ("random", "from torch.cuda import CUDAGraph"),
    ],
)
def test_a_forbidden_import_is_noticed(name: str, code: str) -> None:
    assert problems(name, ast.parse(code))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("program", "def late():\n    from fsdp_compiled.dump import summary"),
        ("passes.update", "from fsdp_compiled.optim import Rule"),
        ("passes.__init__", "from fsdp_compiled.passes.gather import gather"),
        ("capture", "from torch._dynamo import reset"),
        ("inductor", "import torch\ntorch._inductor.standalone_compile"),
    ],
)
def test_an_allowed_import_is_allowed(name: str, code: str) -> None:
    assert not problems(name, ast.parse(code))
