"""Several that save in one folder, and a folder that goes or cannot be synced: what is there is what is said."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.checkpoint import data_file, folder
from fsdp_compiled.runtime.checkpoint.writing import SaveError

LOCKS = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def build(value: float) -> Sharded:
    """Nothing is trained: what is saved is the value."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return compile_sharded(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x: m(x).sum(), policy=Policy(lower="eager")
    )


def loaded(place: Path) -> float:
    other = build(-1.0)
    assert other.load(place) is not None
    return float(other.full_state_dict()["weight"][0, 0])


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("step", [5, 4])
def test_two_at_once_do_not_replace_each_other(
    tmp_path: Path, writers: threading.Event, step: int, replace: bool
) -> None:
    writers.set()
    build(1.0).save(tmp_path, step=3, wait=True)
    writers.clear()
    future, other = build(2.0).save(tmp_path, step=5), build(3.0)
    with pytest.raises(ValueError, match=r"Another Sharded of this process is writing the checkpoint of step 5"):
        other.save(tmp_path, step=step, replace=replace)
    assert loaded(tmp_path) == 1.0, "the one before"
    writers.set()
    assert future.result().name == "step-5" and loaded(tmp_path) == 2.0
    other.save(tmp_path, step=6, wait=True)
    assert loaded(tmp_path) == 3.0 and folder.steps(tmp_path) == [3, 5, 6]


def test_what_came_while_one_wrote_is_not_replaced(tmp_path: Path, writers: threading.Event) -> None:
    """By another job, where the file system has no locks."""
    mine = build(1.0)
    future = mine.save(tmp_path / "a", step=5)
    writers.set()
    build(2.0).save(tmp_path / "b", step=5, wait=True)
    future.result()
    writers.clear()
    future = mine.save(tmp_path / "a", step=7)
    shutil.copytree(tmp_path / "b" / "step-5", tmp_path / "a" / "step-7")
    writers.set()
    with pytest.raises(SaveError, match=r"step 7 in .* was not written: .*by another job.*step-7.*Earlier .* as they"):
        future.result()
    assert sorted(os.listdir(tmp_path / "a")) == [".lock", "step-5", "step-7"] and loaded(tmp_path / "a") == 2.0


def test_files_that_go_while_one_writes_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = build(1.0)
    mine.save(tmp_path, step=1, wait=True)
    write = data_file.write

    def lost(path: Path, *given: Any) -> Any:
        found = write(path, *given)
        path.unlink()
        return found

    monkeypatch.setattr(data_file, "write", lost)
    with pytest.raises(SaveError, match=r"safetensors is missing, and \d+ were written\. Another process removes"):
        mine.save(tmp_path, step=2, wait=True)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-1"]


def failing(number: int, place: Path) -> Callable[[int], None]:
    """An ``fsync`` that fails for this folder alone."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), os.stat(place)):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    return fsync


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_that_cannot_be_synced_after_the_rename_holds_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    mine = build(1.0)
    mine.save(tmp_path, step=1, wait=True)
    mine.state.parameters[mine.plan.buffers[0].key].fill_(2.0)
    step = 1 if replace else 2
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(errno.EIO, tmp_path))
        with pytest.raises(SaveError, match=rf"step {step} in .* is there and complete, but its folder cannot be put"):
            mine.save(tmp_path, step=step, keep=1, replace=replace, wait=True)
    assert loaded(tmp_path) == 2.0
    left = [name for name in os.listdir(tmp_path) if name != ".lock"]
    assert len(left) == 2, "what was before is kept: the new one may not be on the disk"
    mine.save(tmp_path, step=3, keep=1, wait=True)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-3"]


def test_a_file_system_that_cannot_sync_folders_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL, tmp_path))
    build(1.0).save(tmp_path, step=1, wait=True)
    assert loaded(tmp_path) == 1.0


def test_new_folders_are_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[Path] = []
    new = tmp_path / "runs" / "a"
    sync = folder.sync

    def noted(place: Path) -> None:
        assert threading.current_thread() is not threading.main_thread(), "a step would wait for the disk"
        if not (new / "step-1").exists():
            before.append(place)
        sync(place)

    monkeypatch.setattr(folder, "sync", noted)
    build(1.0).save(new, step=1, wait=True)
    assert {tmp_path, tmp_path / "runs"} <= set(before)


def test_a_folder_that_was_removed_is_locked_anew(tmp_path: Path) -> None:
    mine = build(1.0)
    for step in (1, 2):
        mine.save(tmp_path / "a", step=step, wait=True)
        tried = subprocess.run([sys.executable, "-c", LOCKS, tmp_path / "a" / folder.LOCK], capture_output=True)
        assert b"BlockingIOError" in tried.stderr
        shutil.rmtree(tmp_path / "a")


def test_a_fork_does_not_have_its_parents_lock(tmp_path: Path) -> None:
    folder.lock(tmp_path)
    child = os.fork()
    if not child:
        try:
            folder.lock(tmp_path)
        except ValueError as error:
            os._exit(0 if "Another process saves" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
