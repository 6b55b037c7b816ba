"""A disk that is full, a quota, a folder that may only be read: a clear error, and the checkpoint before is intact."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.checkpoint.writing import SaveError

WIDTH = 100  # 40,000 bytes of weights, and twice as much of the optimizer's state
X = torch.ones(2, WIDTH)


@pytest.fixture(scope="module")
def sharded() -> Sharded:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    return compile_sharded(model, optimizer, loss=lambda m, x: m(x).square().mean(), policy=Policy(lower="eager"))


def mounted(place: Path, *given: str) -> None:
    if subprocess.run(["mount", *given, str(place)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    mounted(tmp_path, "-t", "tmpfs", "-o", "size=200k", "tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Path]:
    """A folder, and then a limit to what a file may hold."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check(sharded: Sharded, folder: Path, reason: str) -> None:
    expected = rf"step \d+ in .* was not written: rank 0: {reason}.*Earlier checkpoints are as they were"
    left = sorted(os.listdir(folder))
    assert sharded.step(X).isfinite()
    with pytest.raises(SaveError, match=expected):
        sharded.save(folder, wait=True)
    sharded.save(folder).exception()
    with pytest.raises(SaveError, match=expected):
        sharded.step(X)
    assert sharded.step(X).isfinite()
    with pytest.raises(ValueError, match=f"The weights cannot be written to .*{reason}"):
        for number in range(3):
            sharded.export(folder / f"exported-{number}")
    assert sorted(one for one in os.listdir(folder) if not one.startswith("exported")) == left


def test_a_full_disk(sharded: Sharded, small: Path) -> None:
    place = sharded.save(small, step=0, wait=True).result()
    check(sharded, small, "No space left on device")
    assert place == small / "step-0" and sharded.load(small) == 0


def test_a_quota(sharded: Sharded, quota: Path) -> None:
    sharded.save(quota, step=0, wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    check(sharded, quota, "File too large")
    assert sharded.load(quota) == 0


def test_a_folder_that_may_only_be_read(sharded: Sharded, tmp_path: Path) -> None:
    folder, seen = tmp_path / "folder", tmp_path / "seen"
    seen.mkdir()
    sharded.save(folder, step=0, wait=True)
    mounted(seen, "--bind", str(folder))
    try:
        mounted(seen, "-o", "remount,bind,ro")
        with pytest.raises(ValueError, match=r"No checkpoint can be written in .*seen: Read-only file system"):
            sharded.save(seen)
        assert sharded.step(X).isfinite() and sharded.load(seen) == 0
    finally:
        subprocess.run(["umount", "-l", str(seen)], check=True)
