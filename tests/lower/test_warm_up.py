"""Inductor's first questions to the compiler are answered while a step is traced: once a machine, by one rank of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.lower import inductor
from fsdp_compiled.lower.inductor import PIECES
from fsdp_compiled.torch_private.inductor import VecISA

Begin = Callable[[], threading.Thread | None]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Begins anew with an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield inductor.warm_up.__wrapped__
    inductor.warm_up.cache_clear()


def test_the_trials_are_made_by_what_remembers_them(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[str] = []
    monkeypatch.setattr(inductor, "pick_vec_isa", lambda: answered.append(VecISA.check_build.__name__))
    thread = begin()
    assert thread is not None
    thread.join()
    assert answered == ["asked"]  # `isa_probes`


def test_one_rank_begins_and_only_where_nothing_was_compiled(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    monkeypatch.setattr(inductor, "_try_compiler", lambda: began.append("began"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert begin() is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    thread = begin()
    assert thread is not None
    thread.join()
    (tmp_path / "fsdp_compiled" / PIECES).mkdir(parents=True)
    assert begin() is None and began == ["began"]


def test_a_compiler_that_fails_is_told_where_it_is_needed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inductor, "pick_vec_isa", fails)
    with caplog.at_level("INFO", "fsdp_compiled"):
        thread = begin()
        assert thread is not None
        thread.join()
    assert "ready" not in caplog.text


@pytest.mark.parametrize(("how", "expected"), [("inductor", 1), ("eager", 0)])
def test_it_begins_with_a_model_that_is_compiled(how: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    monkeypatch.setattr("fsdp_compiled.runtime.programs.program_maker.warm_up", lambda: began.append("began"))
    model = torch.nn.Linear(4, 4)
    compile_sharded(model, torch.optim.SGD(model.parameters()), loss=lambda m, x: m(x).sum(), policy=Policy(lower=how))
    assert len(began) == expected


PREPARE = "from fsdp_compiled.lower.inductor import prepare_machine; prepare_machine()"
STEPS = """
import torch
from fsdp_compiled import Policy, compile_sharded
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
loss = lambda model, x: model(x).square().mean()
optimizer = torch.optim.SGD(model.parameters())
compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="inductor")).step(torch.ones(2, 8))
"""
COMPILER = """#!/bin/sh
echo "$*" >> {calls}
exec {compiler} "$@"
"""


@pytest.mark.exhaustive
def test_a_machine_that_was_prepared_compiles_kernels_alone(tmp_path: Path) -> None:
    """The control is not prepared: it tries the compiler first, and each of its libraries reads the header."""

    def calls(folder: Path, *programs: str) -> list[str]:
        """What the last of them calls the compiler for."""
        (folder / "temporary").mkdir(parents=True)
        said, compiler = folder / "calls", folder / "g++"
        compiler.write_text(COMPILER.format(calls=said, compiler=shutil.which(os.environ.get("CXX", "g++"))))
        compiler.chmod(0o755)
        places = {"TORCHINDUCTOR_CACHE_DIR": folder / "cache", "TMPDIR": folder / "temporary", "CXX": compiler}
        for program in programs:
            said.write_text("")
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(one) for name, one in places.items()}
            subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=True)
        return [line for line in said.read_text().splitlines() if ".cpp" in line]

    prepared = calls(tmp_path / "prepared", PREPARE, STEPS)
    control = calls(tmp_path / "control", STEPS)
    assert len(prepared) == 1 and "precompiled_headers" in prepared[0]
    assert len(control) > 1 and not any("precompiled_headers" in line for line in control)
