"""Kernels of Inductor's compiled together: the same numbers, one call of the compiler, found at the next start."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import codecache, cpp_builder
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.lower import cpp_compiler, inductor
from fsdp_compiled.lower.cpp_compiler import UNITS, Kernel, compile_together, fits, keys_of
from fsdp_compiled.lower.piece import Piece

aten = torch.ops.aten
Compile = Callable[..., list[torch.Tensor]]
SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* out)
{
    at::vec::Vectorized<float>(3).store(out);
}
"""


def piece(turn: Any = aten.sin.default) -> Piece:
    """Three products, with something in between that is a kernel each."""
    graph = fx.Graph()
    with FakeTensorMode():
        given = graph.placeholder("a")
        given.meta["val"] = torch.empty(24, 24)
        value, nodes = given, []
        for target in (turn, aten.exp.default, aten.tanh.default):
            nodes.append(graph.call_function(aten.mm.default, (value, given)))
            nodes.append(graph.call_function(target, (nodes[-1],)))
            value = nodes[-1]
        nodes.append(graph.call_function(aten.softmax.int, (value, 1)))
        for node in nodes:
            node.meta["val"] = torch.empty(24, 24)
    graph.output((nodes[-1],))
    return Piece(nodes)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """With an empty cache: the libraries that the compiler made, but for trials of the processor."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made: list[str] = []
    build = cpp_builder.CppBuilder.build

    def watched(self: cpp_builder.CppBuilder) -> None:
        if (place := self.get_target_file_path()).endswith(".main.so"):
            made.append(place)
        build(self)

    monkeypatch.setattr(cpp_builder.CppBuilder, "build", watched)
    yield made
    forget()


def forget() -> None:
    """As a process that has just begun."""
    inductor._compiled.clear()
    codecache.PyCodeCache.cache_clear()
    codecache.CppPythonBindingsCodeCache.cache.clear()


def run(one: Piece | None = None) -> torch.Tensor:
    forget()
    one = one or piece()
    (call,) = inductor.compile_all({one.key(): one}).values()
    given = torch.randn(24, 24, generator=torch.Generator().manual_seed(0)) / 5
    return call([given])[0]


def in_modules() -> list[Any]:
    return [
        value
        for module in codecache.PyCodeCache.modules
        for name, value in vars(module).items()
        if name.startswith("cpp_fused")
    ]


def test_kernels_of_a_piece_are_one_unit_and_compute_what_each_does_alone(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = run()
    assert len(built) == 1 and len(in_modules()) == 3
    assert not any(isinstance(function, Kernel) for function in in_modules())  # nothing is left in between
    units = [path for path in (tmp_path / "fsdp_compiled" / UNITS).iterdir() if path.stat().st_size > 1000]
    assert len(units) == 1 and len(keys_of(units[0].read_bytes()[32:].decode())) == 3

    monkeypatch.setattr(cpp_compiler, "fits", lambda source: False)
    assert torch.equal(run(), together) and len(built) == 1 + 3
    assert not torch.equal(run(piece(aten.cos.default)), together)  # another kernel would be seen


def test_a_second_start_finds_them_and_only_what_is_new_is_compiled(built: list[str]) -> None:
    first = run()
    assert torch.equal(run(), first) and len(built) == 1
    assert not torch.equal(run(piece(aten.cos.default)), first) and len(built) == 2
    unit = Path(built[1]).with_suffix(".cpp").read_text()
    assert len(keys_of(unit)) == 1  # two of the three are in the first


def test_a_unit_that_fails_is_compiled_kernel_by_kernel(
    built: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = cpp_compiler.unit_text
    monkeypatch.setattr(cpp_compiler, "unit_text", lambda kernels: text(kernels) + "no C++")
    with caplog.at_level(logging.INFO, "fsdp_compiled"):
        broken = run()
    assert "one by one" in caplog.text and len(built) == 1 + 3
    monkeypatch.setattr(cpp_compiler, "unit_text", text)
    assert torch.equal(run(), broken)  # what failed was not kept
    assert len(built) == 1 + 3 + 1


def test_a_library_that_cannot_be_loaded_is_done_without(built: list[str]) -> None:
    first = run()
    Path(built[0]).unlink()  # which is still in use
    Path(built[0]).write_bytes(b"cut off")
    for name in [name for name in sys.modules if ".kernel_" in name]:
        del sys.modules[name]
    assert torch.equal(run(), first) and len(built) == 1 + 3


def test_a_kernel_that_is_called_before_is_compiled_by_itself(built: list[str]) -> None:
    kernel = Kernel(["float*"], SOURCE)
    for _ in range(2):
        kernel(values := torch.zeros(16))
        assert values[:4].tolist() == [3.0] * 4
    assert len(built) == 1


def test_what_other_threads_compile_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, types, source: asked.append(source))
    before = AsyncCompile.cpp_pybinding
    monkeypatch.setattr(cpp_compiler, "_compile", lambda kernels, folder: None)
    with compile_together(tmp_path):
        thread = threading.Thread(target=AsyncCompile().cpp_pybinding, args=(["float*"], SOURCE))
        thread.start()
        thread.join()
        assert isinstance(AsyncCompile().cpp_pybinding(["float*"], SOURCE), Kernel)
    assert asked == [SOURCE] and AsyncCompile.cpp_pybinding is before


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace("kernel(", "cpp_fused_add("),
        SOURCE + SOURCE,
        SOURCE + "void again(float* out) { kernel(out); }",
        SOURCE.replace("{", "{\n#define store none", 1),
        SOURCE.replace("cpp_prefix.h", "other.h"),
        SOURCE + 'extern "C" void second(float* out) {}',
    ],
)
def test_kernels_of_another_form_go_inductors_way(other: str) -> None:
    assert fits(SOURCE) and not fits(other)


@pytest.mark.parametrize(("count", "cores", "parts"), [(1, 4, 1), (12, 4, 1), (13, 4, 2), (90, 4, 4)])
def test_units_are_few_and_no_more_than_cores(
    count: int, cores: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Kernel]] = []

    def text(part: dict[str, Kernel]) -> str:
        found.append(part)
        return f"unit {len(found)}"

    monkeypatch.setattr(cpp_compiler, "_cores", lambda: cores)
    monkeypatch.setattr(cpp_compiler, "unit_text", text)
    monkeypatch.setattr(cpp_compiler, "_loading", lambda text: lambda: SimpleNamespace(functions=[]))
    kernels = [Kernel([], "x" * (place + 1)) for place in range(count)]
    cpp_compiler._compile(kernels, None)
    assert len(found) == parts
    assert sorted(len(one.source) for part in found for one in part.values()) == list(range(1, count + 1))
    load = [sum(len(kernel.source) for kernel in part.values()) for part in found]
    assert max(load) - min(load) <= count


def test_a_header_that_is_there_is_taken_and_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def precompile(header: str, command: str) -> str:
        codecache._worker_compile_cpp("lock", ("builder",))
        return str(tmp_path / header)

    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "_worker_compile_cpp", lambda *given: made.append(given))
    monkeypatch.setattr(codecache._precompile_header, "__wrapped__", precompile)
    for there, expected in (("", ""), ("other.gch", ""), ("own.gch", str(tmp_path / "own"))):
        if there:
            (tmp_path / there).touch()
        with cpp_compiler.with_found_headers():
            assert codecache._precompile_header("own", "command") == expected
    assert made == []
