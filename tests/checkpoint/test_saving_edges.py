"""Saves that meet something odd: another of the same process, a file system without locks, a kill between two names."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.distributed.call_store import Board
from fsdp_compiled.runtime.checkpoint import folder, writing
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.saving import Save
from fsdp_compiled.runtime.checkpoint.values import decode, encode


def build(steps: int = 1) -> Sharded:
    model = nn.Linear(4, 4)
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x: m(x).sum(), policy=Policy(lower="eager")
    )
    for _ in range(steps):
        sharded.step(torch.ones(2, 4))
    return sharded


def test_a_save_that_runs_cannot_be_cancelled(tmp_path: Path, writers: threading.Event) -> None:
    """Its memory would be used again by the next save while it is being written."""
    sharded = build()
    future = sharded.save(tmp_path)
    assert not future.cancel() and not future.done()
    writers.set()
    assert future.result() == tmp_path / "step-1" and sharded.load(tmp_path) == 1


def test_two_of_one_process_do_not_remove_what_the_other_writes(tmp_path: Path, writers: threading.Event) -> None:
    (tmp_path / ".step-9.0123abcd").mkdir()
    first, second = build(1).save(tmp_path), build(2).save(tmp_path)
    writers.set()
    assert [first.result().name, second.result().name] == ["step-1", "step-2"]
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-1", "step-2"]


def test_a_file_system_without_locks_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def none(*given: Any) -> None:
        asked.append(given)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    build().save(tmp_path, wait=True)
    assert len(asked) == 1


def test_a_checkpoint_whose_replacement_was_killed_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that cannot exchange two names."""
    sharded = build()
    place = sharded.save(tmp_path, wait=True).result()
    before = (place / "manifest.json").read_bytes()
    rename = os.rename

    def killed(old: Path, new: Path) -> None:
        if Path(new) == place:
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with monkeypatch.context() as patched:
        patched.setattr(folder.os, "rename", killed)
        with pytest.raises(writing.SaveError, match="not known here: KeyboardInterrupt"):
            sharded.save(tmp_path, replace=True, wait=True)
    assert folder.steps(tmp_path) == []
    assert build(0).load(tmp_path) == 1
    assert (place / "manifest.json").read_bytes() == before
    sharded.save(tmp_path, wait=True, replace=True)
    assert (place / "manifest.json").read_bytes() != before and folder.steps(tmp_path) == [1]
    assert not (tmp_path / ".step-1.replaced").exists()


def test_what_ranks_said_of_a_save_does_not_stay_in_the_store() -> None:
    store = dist.HashStore()
    board = Board(store, 0, 2)
    save = Save(3, Path("aside"), None, False, Manifest(1, 2, {}, {}, {}, {}, {}), {})
    for rank in (0, 1):
        board.set(save.key(f"part {rank}"), "{}")
        board.set(save.key(f"heard {rank}"), "")
    board.set(save.key("end"), "ended ")
    assert store.num_keys() == 5
    writing._linger(save, board)
    assert store.num_keys() == 1 and board.get(save.key("end")) == "ended "


def test_containers_with_a_bound_and_odd_arrays_come_back() -> None:
    value = {
        "bounded": deque([1, (2, torch.ones(1))], maxlen=2),
        "arrays": [np.arange(6).reshape(2, 3)[::-1, ::2], np.arange(3, dtype=">i4"), np.broadcast_to(1.5, (2, 2))],
    }
    tensors: dict[str, torch.Tensor] = {}
    found = decode(encode(value, "x", tensors), tensors)
    assert found["bounded"] == value["bounded"] and found["bounded"].maxlen == 2
    for one, expected in zip(found["arrays"], value["arrays"], strict=True):
        assert np.array_equal(one, expected)


def test_complex_numbers_of_two_float64_come_back(tmp_path: Path) -> None:
    """Which safetensors has no word for: as pairs, and the manifest says so. Parameters are refused when they come."""

    def build(seed: int) -> Sharded:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        model.register_buffer("phase", torch.randn(5, 3, dtype=torch.complex128))
        return compile_sharded(
            model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x: m(x).sum(), policy=Policy(lower="eager")
        )

    first, second = build(0), build(1)
    place = first.save(tmp_path, wait=True).result()
    entry = json.loads((place / "manifest.json").read_text())["content"]["tensors"]["buffer phase"]
    assert (entry["dtype"], entry["shape"]) == ("complex128", [5, 3])
    with safe_open(place / "shard-00000-of-00001.safetensors", "pt") as file:
        assert torch.equal(torch.view_as_complex(file.get_tensor("buffer phase")), first.state.buffers["phase"])
    assert not torch.equal(first.state.buffers["phase"], second.state.buffers["phase"])
    second.load(tmp_path)
    assert torch.equal(first.state.buffers["phase"], second.state.buffers["phase"])
    with pytest.raises(ValueError, match=r"phase is torch.complex128, .* Keep it as torch.view_as_real"):
        first.export(tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_a_buffer_that_is_a_lazy_conjugate_is_exported_and_loaded_as_what_it_stands_for(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("phases", torch.randn(3, dtype=torch.complex64).conj())
    expected = model.phases.resolve_conj().clone()
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), policy=Policy(lower="eager"))
    sharded.export(tmp_path / "weights")
    with safe_open(tmp_path / "weights" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("phases"), expected)
    given = sharded.full_state_dict()
    sharded.load_full_state_dict(given | {"phases": (2 * expected.conj().resolve_conj()).conj()})
    assert torch.equal(sharded.full_state_dict()["phases"], 2 * expected)


class Scaled(torch.optim.Optimizer):
    """Its rate is a tensor of two elements."""

    def __init__(self, params: Any, scale: torch.Tensor) -> None:
        super().__init__(params, {"lr": 0.1, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad * group["scale"].sum(), alpha=-group["lr"])


def test_an_option_that_is_a_tensor_of_several_elements_does_not_keep_a_checkpoint_from_loading(tmp_path: Path) -> None:
    def made() -> Sharded:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Scaled(model.parameters(), torch.tensor([0.5, 0.25]))
        loss = lambda model, x: model(x).square().mean()  # noqa: E731
        return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))

    first, second = made(), made()
    first.step(torch.ones(2, 4))
    first.save(tmp_path, wait=True)
    assert second.load(tmp_path) == 1
    assert torch.equal(first.full_state_dict()["weight"], second.full_state_dict()["weight"])


def test_where_numpy_is_missing_a_checkpoint_with_its_generator_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().save(tmp_path, wait=True)
    monkeypatch.setitem(sys.modules, "numpy.random", None)
    monkeypatch.delattr(np, "random")
    assert build(0).load(tmp_path) == 1


def test_tied_weights_that_hold_the_same_nan_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    model = Tied()
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), policy=Policy(lower="eager"))
    given = {name: value.clone() for name, value in sharded.full_state_dict().items()}
    for value in given.values():
        value[0, 0] = float("nan")
    sharded.load_full_state_dict(given)
    assert sharded.full_state_dict()["a.weight"].isnan().sum() == 1
    given["a.weight"][1, 1] += 1
    with pytest.raises(ValueError, match="which are one parameter here, so nothing was loaded"):
        sharded.load_full_state_dict(given)
