"""Compiled pieces on disk: found without tracing, compiled anew where anything that decides of the code has changed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fsdp_compiled.capture import disk_cache
from fsdp_compiled.lower import inductor
from fsdp_compiled.lower.piece import Piece
from tests.modes import changed

Compile = Callable[..., tuple[list[torch.Tensor], int]]


def piece(width: int = 24, target: Any = torch.ops.aten.sin.default) -> Piece:
    """sin(a @ b) + 1"""
    graph = fx.Graph()
    with FakeTensorMode(shape_env=ShapeEnv()):
        given = [graph.placeholder(name) for name in "ab"]
        for node in given:
            node.meta["val"] = torch.empty(width, width)
        product = graph.call_function(torch.ops.aten.mm.default, tuple(given))
        turned = graph.call_function(target, (product,))
        last = graph.call_function(torch.ops.aten.add.Tensor, (turned, 1))
        for node in (product, turned, last):
            node.meta["val"] = torch.empty(width, width)
    graph.output((last,))
    return Piece([product, turned, last])


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compile]:
    """Compiles a piece as a process would that has just begun: its result, and how often something was compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    count = [0]
    artifact = inductor._artifact

    def watched(piece: Piece) -> Any:
        count[0] += 1
        return artifact(piece)

    monkeypatch.setattr(inductor, "_artifact", watched)
    torch.manual_seed(0)
    inputs = [torch.randn(24, 24) for _ in range(2)]

    def run(one: Piece | None = None) -> tuple[list[torch.Tensor], int]:
        inductor._compiled.clear()
        count[0] = 0
        one = one or piece()
        (call,) = inductor.compile_all({one.key(): one}).values()
        results = [*call(list(inputs)), *call(list(inputs))]
        assert torch.equal(results[0], results[1])
        torch.testing.assert_close(results[0], one.graph_module()(*inputs)[0], atol=0.01, rtol=0)  # under autocast
        assert call.unwrapped  # type: ignore[attr-defined]
        return results[:1], count[0]

    yield run
    inductor._compiled.clear()


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "fsdp_compiled" / "pieces").glob("*"))


def test_a_piece_is_compiled_once_and_then_found(compiled: Compile, tmp_path: Path) -> None:
    (first,), made = compiled()
    assert made == 1 and len(kept(tmp_path)) == 1
    (second,), made = compiled()
    assert made == 0 and torch.equal(first, second)


def test_a_damaged_file_is_compiled_anew_and_replaced(
    compiled: Compile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled()
    (place,) = kept(tmp_path)
    place.write_bytes(place.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        assert compiled()[1] == 1
    assert "is damaged" in caplog.text
    assert compiled()[1] == 0


THREADS = torch.get_num_threads()
CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "determinism": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "matmul": lambda: changed(partial(setattr, torch.backends.cuda.matmul, "allow_fp16_accumulation"), True, False),
    "threads": lambda: changed(torch.set_num_threads, THREADS + 1, THREADS),
    "inductor": lambda: torch._inductor.config.patch(epilogue_fusion=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "version": lambda: mock.patch.object(disk_cache, "versions", lambda: {"torch": "3.0"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_piece_is_not_found_where_what_decides_of_its_code_has_changed(compiled: Compile, change: str) -> None:
    assert compiled()[1] == 1
    with CHANGES[change]():
        assert compiled()[1] == 1
    assert compiled()[1] == 0


@pytest.mark.parametrize("switch", ["force_disable_caches", "fx_graph_cache"])
def test_nothing_is_kept_where_inductor_keeps_nothing(compiled: Compile, tmp_path: Path, switch: str) -> None:
    with torch._inductor.config.patch({switch: switch == "force_disable_caches"}):
        assert compiled()[1] == compiled()[1] == 1
    assert kept(tmp_path) == []


def test_nothing_is_kept_where_a_function_of_the_users_takes_part(compiled: Compile, tmp_path: Path) -> None:
    def custom(graph: fx.Graph) -> None:
        pass

    with torch._inductor.config.patch(post_grad_custom_post_pass=custom):
        assert compiled()[1] == compiled()[1] == 1
    assert kept(tmp_path) == []


def test_operators_of_the_users_are_not_kept(compiled: Compile, tmp_path: Path) -> None:
    """Their code may be another at the next start, and a piece's key would not tell."""
    with torch.library._scoped_library("tests_inductor", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        assert compiled(piece(target=torch.ops.tests_inductor.twice.default))[1] == 1
        assert compiled(piece(target=torch.ops.tests_inductor.twice.default))[1] == 1
    assert kept(tmp_path) == []


def test_the_largest_piece_is_compiled_first_and_progress_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor, "_artifact", lambda piece: lambda *inputs: inputs)
    large, small = piece(23), piece(22)
    small = Piece(small.nodes[:2])
    with caplog.at_level("INFO", "fsdp_compiled"):
        held = inductor.compile_all({"small": small, "large": large})
        inductor.compile_all({"small": small})  # says nothing: it is held
        gone = [weakref.ref(call) for call in held.values()]
        del held
        assert all(one() is None for one in gone)  # at once, not with the next collection of garbage
        inductor.compile_all({"small": small})
    assert [record.getMessage() for record in caplog.records] == [
        "compiling 1 of 2 pieces (3 operators)",
        "compiling 2 of 2 pieces (2 operators)",
        "compiling 1 of 1 pieces (2 operators)",
    ]
