"""Bundles: made by one run, loaded by another that calls no compiler; what does not fit is refused, nothing done."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_compiled.cli import main
from fsdp_compiled.lower import bundle
from fsdp_compiled.lower.bundle import MAGIC, BundleError, differences, here, load_bundle, write_bundle
from tests.launch import environment

SCRIPT = Path(__file__).parents[1] / "workers" / "bundled.py"


def run(*command: object, **variables: object) -> subprocess.CompletedProcess[str]:
    around = environment() | {name: str(value) for name, value in variables.items()}
    line = [sys.executable, "-P", *map(str, command)]
    return subprocess.run(line, env=around, capture_output=True, text=True, timeout=600)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`fsdp-compiled compile` with these arguments, in this process; the script runs in its own."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return lambda *arguments: main(["compile", *map(str, arguments)])


def test_a_start_from_a_bundle_calls_no_compiler(
    tmp_path: Path, compiled: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    made, cache = tmp_path / "step.bundle", tmp_path / "cache"
    assert compiled("--out", made, "--calls", 2, SCRIPT, tmp_path / "no.json", 1000) == 0
    assert f"FSDP_COMPILED_BUNDLE={made}" in capsys.readouterr().out
    assert not (tmp_path / "no.json").exists()  # it ended long before its thousand steps
    told = run(SCRIPT, tmp_path / "warm.json", 3, FSDP_COMPILED_BUNDLE=made, TORCHINDUCTOR_CACHE_DIR=cache)
    assert told.returncode == 0, told.stderr
    warm = json.loads((tmp_path / "warm.json").read_text())
    assert warm["compilations"] == [] and warm["pieces"] > 0
    assert warm["losses"] == pytest.approx(warm["expected"], rel=1e-5) and len(set(warm["losses"])) == 3
    assert not [file for file in cache.rglob("*") if file.name.startswith(".")]


@pytest.mark.exhaustive
def test_two_ranks_of_a_loop_of_their_own_start_from_a_bundle(tmp_path: Path) -> None:
    made, cache = tmp_path / "step.bundle", tmp_path / "cache"
    options = "--nproc", 2, "--out", made, "--calls", 2
    said = run("-m", "fsdp_compiled", "compile", *options, SCRIPT, tmp_path / "no.json", 1000)
    assert said.returncode == 0, said.stderr
    ranks = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    told = run(*ranks, SCRIPT, tmp_path / "warm.json", 3, FSDP_COMPILED_BUNDLE=made, TORCHINDUCTOR_CACHE_DIR=cache)
    assert told.returncode == 0, told.stderr
    warm = json.loads((tmp_path / "warm.json").read_text())
    assert warm["compilations"] == [] and list(cache.rglob("*.so"))
    assert warm["losses"] == pytest.approx(warm["expected"], rel=1e-5) and len(set(warm["losses"])) == 3


def place(folder: Path, **changed: Any) -> Path:
    """A bundle of one small file."""
    cache = folder / "made"
    (cache / "fsdp_compiled" / "pieces").mkdir(parents=True, exist_ok=True)
    (cache / "fsdp_compiled" / "pieces" / "key").write_bytes(b"code")
    (cache / "locks").mkdir(exist_ok=True)
    (cache / "locks" / "one.lock").touch()
    write_bundle(cache, folder / "one.bundle", here(2) | changed)
    return folder / "one.bundle"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_what_is_packed_comes_out_once_and_locks_stay(cache: Path) -> None:
    made = place(cache.parent)
    assert load_bundle(made, ranks=2) == 1 and load_bundle(made, ranks=2) == 0
    assert [path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()] == [
        "fsdp_compiled/pieces/key"
    ]


@pytest.mark.parametrize("name", list(here(2)))
def test_one_for_another_place_is_refused_by_name(cache: Path, name: str) -> None:
    made = place(cache.parent, **{name: ["an_instruction"] if name.endswith("instructions") else "another"})
    with pytest.raises(BundleError, match="was made for another place") as error:
        load_bundle(made, ranks=2)
    assert name in str(error.value) and "fsdp-compiled compile" in str(error.value)
    assert not list(cache.iterdir())


def test_a_processor_with_more_instructions_will_do() -> None:
    now = here(1)
    fewer = now | {"the processor's instructions": now["the processor's instructions"][1:]}
    assert differences(fewer, now) == [] and differences(now, fewer) != []


def _leaving(content: bytes) -> bytes:
    """A bundle with the right checksum and a file that would leave the folder."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(bundle.MANIFEST, json.dumps({"made for": here(2), "script": ["", ""]}))
        archive.writestr("files/../../escaped", b"code")
    return MAGIC + hashlib.sha256(packed.getvalue()).digest() + packed.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2], lambda content: b"", lambda content: b"x" + content[1:],
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], _leaving,
        lambda content: MAGIC + hashlib.sha256(b"no zip").digest() + b"no zip",
    ],
    ids=["cut", "empty", "other", "flipped", "leaving", "no archive"],
)  # fmt: skip
def test_a_damaged_one_is_refused_with_nothing_written(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    made = place(cache.parent)
    made.write_bytes(damage(made.read_bytes()))
    with pytest.raises(BundleError, match=r"is damaged|is no bundle"):
        load_bundle(made, ranks=2)
    assert not list(cache.iterdir()) and not (cache.parent / "escaped").exists()
    with pytest.raises(BundleError, match="cannot be read"):
        load_bundle(cache.parent / "nowhere", ranks=2)


def test_one_that_the_environment_names_and_is_of_no_use_is_said_and_compiled_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FSDP_COMPILED_BUNDLE", str(place(cache.parent)))
    for _ in range(2):
        bundle.load_named_bundle(3)
    assert caplog.text.count("the number of ranks: made with 2, here 3") == 1
    assert not list(cache.iterdir())


def test_a_script_that_compiles_nothing_makes_no_bundle(
    tmp_path: Path, compiled: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('done')")
    assert compiled("--out", tmp_path / "no.bundle", script) == 2
    assert "0 of 1 ranks compiled a program" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["nothing.py"]
