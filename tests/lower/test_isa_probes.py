"""Trials of the compiler: made once for each set of flags, unless they fail or nothing may be kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, VecISA

from fsdp_compiled.lower.cpp_compiler import remembered, without_headers


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[str]]:
    """In the place of Inductor's trials: those made so far, and from now on all with this outcome."""
    made: list[str] = []

    def outcome(succeeds: bool) -> list[str]:
        def check(isa: VecISA, code: str) -> bool:
            made.append(f"{isa} {code}")
            return succeeds

        monkeypatch.setattr(VecISA, "check_build", check)
        return made

    return outcome


def test_a_trial_that_succeeded_is_made_once(trials: Callable[[bool], list[str]], tmp_path: Path) -> None:
    made = trials(True)
    for _ in range(2):
        for isa, code in ((VecAVX2(), "one"), (VecAVX2(), "two"), (VecAVX512(), "one")):
            with remembered(tmp_path):
                assert isa.check_build(code)
    assert made == ["avx2 one", "avx2 two", "avx512 one"]


def test_another_compiler_is_tried(
    trials: Callable[[bool], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trials(True)
    for version in ("13", "14", "14"):
        monkeypatch.setattr(
            "fsdp_compiled.lower.cpp_compiler.isa_fingerprint",
            lambda flags, version=version: f"{version} {flags}",
        )
        with remembered(tmp_path):
            assert VecAVX2().check_build("one")
    assert len(made) == 2


def test_a_trial_that_failed_is_made_again(trials: Callable[[bool], list[str]], tmp_path: Path) -> None:
    for succeeds in (False, True, False):
        made = trials(succeeds)
        with remembered(tmp_path):
            assert VecAVX2().check_build("one") == (len(made) > 1)
    assert len(made) == 2


def test_nothing_is_remembered_without_a_folder(trials: Callable[[bool], list[str]]) -> None:
    made = trials(True)
    before = VecISA.check_build
    for _ in range(2):
        with remembered(None):
            assert cpu_vec_isa.VecAVX2().check_build("one")
    assert len(made) == 2 and VecISA.check_build is before


def test_headers_are_left_alone_inside_and_are_what_they_were_after() -> None:
    before = codecache._precompile_header
    with without_headers():
        assert codecache._precompile_header("any.h", "command") == ""
    assert codecache._precompile_header is before
