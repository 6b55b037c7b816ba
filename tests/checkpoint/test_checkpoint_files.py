"""What is on the disk: complete or absent, readable by safetensors, and no bit of it can change unseen."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime.checkpoint import data_file, folder
from fsdp_compiled.runtime.checkpoint.data_file import memory_of
from fsdp_compiled.runtime.checkpoint.values import decode, digest, encode
from fsdp_compiled.runtime.sharded import Sharded

HOLD = """
import fcntl, os, sys, time
file = open(sys.argv[1], "w"); fcntl.lockf(file, fcntl.LOCK_EX)
print(f"process {os.getpid()} on this host", end="", file=file, flush=True); print("held", flush=True); time.sleep(600)
"""  # as `folder.lock` does it, without the time that torch takes to be imported


@pytest.fixture(scope="module")
def sharded() -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    sharded = compile_sharded(
        model,
        torch.optim.AdamW(model.parameters()),
        loss=lambda m, x: m(x).square().mean(),
        policy=Policy(lower="eager"),
    )
    sharded.step(torch.randn(4, 8))
    return sharded


@pytest.fixture(scope="module")
def saved(sharded: Sharded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharded.save(tmp_path_factory.mktemp("saved"), wait=True).result()


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / saved.name)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data_file, "BLOCK", 512)
    yield


def test_whole_tensors_are_read_by_safetensors_under_their_names(sharded: Sharded, saved: Path) -> None:
    found = load_file(saved / "shard-00000-of-00001.safetensors")
    weights = sharded.full_state_dict()
    assert torch.equal(found["model.0.weight"], weights["0.weight"])
    assert torch.equal(found["buffer 1.running_mean"], weights["1.running_mean"])
    assert found["optimizer.state.2.bias.exp_avg"].shape == (3,)


def test_200_flipped_bytes_are_each_noticed_and_change_nothing(sharded: Sharded, copied: Path) -> None:
    state = [tensor.clone() for tensor in tree_leaves(sharded.state)]
    files = sorted(copied.iterdir())
    chosen = random.Random(0)
    for turn in range(200):
        file = files[turn % len(files)]
        place, flip = chosen.randrange(file.stat().st_size), chosen.randrange(1, 256)
        _flip(file, place, flip)
        with pytest.raises(ValueError, match=file.name) as refused:
            sharded.load(copied.parent)
        assert isinstance(refused.value, data_file.Corrupt)
        _flip(file, place, flip)
    assert all(torch.equal(a, b) for a, b in zip(state, tree_leaves(sharded.state)))
    assert sharded.load(copied.parent) == 1  # the control: unflipped it loads


def _flip(file: Path, place: int, by: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ by]))


@pytest.mark.parametrize("how", ["truncated", "longer", "missing", "no manifest", "foreign", "older", "newer"])
def test_damage_is_named_with_its_file_and_the_cure(sharded: Sharded, copied: Path, how: str) -> None:
    data, manifest = copied / "shard-00000-of-00001.safetensors", copied / "manifest.json"
    text = manifest.read_bytes()
    if how == "truncated":
        os.truncate(data, data.stat().st_size - 5)
        expected = f"{data} has .* bytes instead of .*It holds .*Load an older checkpoint"
    elif how == "longer":
        data.write_bytes(data.read_bytes() + b"x")
        expected = f"{data} has .* bytes instead of"
    elif how == "missing":
        data.unlink()
        expected = f"{data} cannot be read: No such file.*It holds model"
    elif how == "no manifest":
        manifest.unlink()
        expected = "holds no complete checkpoint of step 1; there are: none"
    elif how == "foreign":
        manifest.write_text('{"weight_map": {}}')
        expected = f"{manifest} does not begin as a manifest of this package"
    else:
        version = {"older": 2, "newer": 4}[how]
        manifest.write_bytes(text.replace(b'"version": 3', b'"version": %d' % version, 1))
        expected = f"{manifest} has version {version}, and this package reads 3.*{how}"
    with pytest.raises(ValueError, match=expected):
        sharded.load(copied.parent, step=1)


def test_a_step_that_exists_is_refused_or_replaced_whole(sharded: Sharded, copied: Path) -> None:
    with pytest.raises(ValueError, match=r"step-1 exists.*replace=True"):
        sharded.save(copied.parent)
    (copied / "manifest.json").write_text("damaged")
    sharded.save(copied.parent, wait=True, replace=True)
    assert sharded.load(copied.parent) == 1
    with pytest.raises(ValueError, match=r"holds checkpoints of later steps than 0 \(1\)"):
        sharded.save(copied.parent, step=0)
    assert sorted(path.name for path in copied.parent.iterdir()) == [".lock", "step-1"]


def test_old_ones_go_only_when_the_new_one_is_there(
    sharded: Sharded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 10):
        sharded.save(tmp_path, step=step, keep=2, wait=True)
    assert folder.steps(tmp_path) == [2, 10]

    def killed(path: Path) -> None:  # between rename and removal
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folder, "remove", killed)
        sharded.save(tmp_path, step=11, keep=2).exception()
    assert folder.steps(tmp_path) == [2, 10, 11]
    (tmp_path / ".step-12.0123abcd").mkdir()
    sharded.load(tmp_path)
    sharded.save(tmp_path, step=13, keep=2, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-11", "step-13"]


def test_nothing_is_seen_of_a_checkpoint_until_it_is_whole(
    sharded: Sharded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    sync = os.fsync
    monkeypatch.setattr(data_file.os, "fsync", lambda file: (seen.append(folder.steps(tmp_path)), sync(file))[1])
    sharded.save(tmp_path, step=5, wait=True)
    assert seen == [[], [], [], [5]]  # tensors, manifest, the folder aside; then its parent


def test_where_nothing_can_be_written_nothing_is_begun(sharded: Sharded, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"No checkpoint can be written in .*file"):
        sharded.save(tmp_path / "file")
    assert sharded.step(torch.randn(4, 8)).isfinite()


def test_a_second_process_is_refused_as_long_as_the_first_lives(sharded: Sharded, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / folder.LOCK)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=f"Another process saves checkpoints in .*process {other.pid} on"):
            sharded.save(tmp_path, step=20)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    sharded.save(tmp_path, step=20, wait=True)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_files_and_tensors_need_not_fit_each_other(sharded: Sharded, tmp_path: Path) -> None:
    from fsdp_compiled.runtime.checkpoint import saving

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "FILE", 700)
        place = sharded.save(tmp_path, wait=True).result()
    assert len(list(place.iterdir())) > 4
    before = [tensor.clone() for tensor in tree_leaves(sharded.state)]
    sharded.step(torch.randn(4, 8))
    sharded.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, tree_leaves(sharded.state)))


def test_plain_values_come_back_as_they_were() -> None:
    value: dict[str, Any] = {
        "numbers": [1, -0.0, 1e-310, float("inf"), True, None, 2**70, 3j],
        "text": ("é", b"\0\xff", bytearray(b"x")),
        "counts": Counter({3: 2, 6: 1}),
        "ordered": OrderedDict(b=1, a=2),
        "keys": {1: "one", (2, 3): "two", "$tensor": "no tensor"},
        "sets": {3, 1},
        "tensors": {"half": torch.ones(2, 3).bfloat16(), "none": torch.empty(0, 2), "flag": torch.tensor(True)},
        "numpy": (np.arange(3, dtype=np.uint32), np.float64(0.1)),
        "torch": (torch.float16, torch.device("cpu"), torch.Size([1, 2])),
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(value, "extra x", tensors)
    found = decode(tree, tensors)
    for name in ("numbers", "text", "counts", "ordered", "keys", "sets", "torch"):
        assert found[name] == value[name] and repr(found[name]) == repr(value[name])
    for name, tensor in value["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor) and found["tensors"][name].dtype == tensor.dtype
    assert (found["numpy"][0] == value["numpy"][0]).all() and found["numpy"][1] == 0.1
    assert set(tensors) >= {"extra x:tensors.half", "extra x:numpy[0]"}
    other = {**tensors, "extra x:tensors.half": torch.zeros(2, 3, dtype=torch.bfloat16)}
    assert digest(tree, tensors) == digest(tree, dict(tensors)) != digest(tree, other)


@pytest.mark.parametrize("odd", [object(), lambda: 0, torch.ones(2, device="meta"), {"a": [torch.nn.ReLU()]}])
def test_what_is_no_plain_value_is_refused_by_its_place(odd: Any) -> None:
    with pytest.raises(ValueError, match=r"extra x\.b\[0\].*which a checkpoint cannot hold"):
        encode({"b": [odd]}, "extra x", {})


def test_bytes_keep_their_tensor_alive() -> None:
    held = memory_of(torch.full((1000,), 7, dtype=torch.uint8))
    torch.zeros(1000, dtype=torch.uint8)
    assert bytes(held) == bytes([7]) * 1000
