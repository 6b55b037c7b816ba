"""What no checkpoint of this package says, and what is none: refused by name, with nothing changed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_compiled import Policy, Sharded, compile_sharded

X = torch.arange(8.0).view(2, 4)
SUM = re.compile(rb'"sha256": "([0-9a-f]{64})", "content": ')


def build(seed: int, trained: Callable[[nn.Sequential], Any] = nn.Module.parameters, frozen: bool = False) -> Sharded:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW([one for one in trained(model) if one.requires_grad], lr=0.1)
    sharded = compile_sharded(
        model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=Policy(lower="eager")
    )
    sharded.step(X)
    return sharded


@pytest.fixture(scope="module")
def sharded() -> Sharded:
    return build(1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(0).save(tmp_path_factory.mktemp("written"), wait=True).result()


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "run" / "step-1")
    return tmp_path / "run"


def unchanged(sharded: Sharded, call: Callable[[], Any], expected: str) -> None:
    before, rates = [one.clone() for one in tree_leaves(sharded.state)], torch.get_rng_state()
    with pytest.raises(ValueError, match=expected):
        call()
    assert all(torch.equal(a, b) for a, b in zip(before, tree_leaves(sharded.state), strict=True))
    assert torch.equal(rates, torch.get_rng_state())


def tensor(content: Any) -> Any:
    return next(one for name, one in content["tensors"].items() if name.startswith("model."))


def value(content: Any, name: str) -> Any:
    return content["values"][name]["same"]


def swap(content: Any) -> None:
    """Two tensors of one size, each with the other's bytes: all checksums are right."""
    one, other = (content["tensors"][f"model.{layer}.weight"] for layer in (0, 1))
    one["pieces"], other["pieces"] = other["pieces"], one["pieces"]


EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another folder": (lambda c: c["files"][0].update(name="../../other/file"), "'../../other/file' is no file of its"),
    "an absolute file": (lambda c: c["files"][0].update(name="/etc/hostname"), "'/etc/hostname' is no file of its"),
    "a huge file": (lambda c: c["files"][0].update(size=1 << 80), "has not one checksum for each 4 MiB"),
    "a negative file": (lambda c: c["files"][0].update(size=-1), "has not one checksum for each 4 MiB"),
    "no checksums": (lambda c: c["files"][0].update(checksums=[]), "has not one checksum for each 4 MiB"),
    "no pieces": (lambda c: tensor(c).update(pieces=[]), "0 of 16 elements of model.0.weight are in files"),
    "half a piece": (lambda c: tensor(c)["pieces"][0].__setitem__(1, [2, 4]), "8 of 16 elements of model.0.weight are"),
    "a piece twice": (
        lambda c: tensor(c).update(pieces=tensor(c)["pieces"] * 2),
        r"from \[0, 0\] on are in files twice",
    ),
    "pieces that meet": (
        lambda c: tensor(c).update(pieces=[[[0, 0], [2, 4], 0, 64], [[1, 2], [4, 2], 0, 64]]),
        r"elements of model.0.weight from \[1, 2\] on are in files twice",
    ),
    "a flat piece": (
        lambda c: tensor(c)["pieces"][0].__setitem__(1, [16]),
        "4 of 16 elements of model.0.weight are in files",
    ),
    "before the file": (lambda c: tensor(c)["pieces"][0].__setitem__(3, -8), "a piece of model.0.weight is"),
    "behind the file": (lambda c: tensor(c)["pieces"][0].__setitem__(3, 1 << 20), "which is not in the file"),
    "in another tensor": (
        lambda c: tensor(c)["pieces"][0].__setitem__(3, 6000),
        "the manifest says .*, 6000,",
    ),
    "no such file": (lambda c: tensor(c)["pieces"][0].__setitem__(2, 7), "list index out of range"),
    "a dtype": (lambda c: tensor(c).update(dtype="Tensor"), "model.0.weight is <class 'torch.Tensor'>"),
    "a shape": (lambda c: tensor(c).update(shape=[-1, 4]), r"model.0.weight is torch.float32 \[-1, 4\]"),
    "no tensors": (lambda c: c.pop("tensors"), "'tensors'"),
    "no count": (lambda c: c["values"].pop("updates"), "it has no updates"),
    "a huge count": (lambda c: c["values"].update(updates={"same": 1 << 80}), "OverflowError, int too big to convert"),
    "no step counts": (lambda c: c["values"].pop("scalars"), "it has no scalars"),
    "a step count": (lambda c: value(c, "scalars")[0]["scalars"].update(step="x"), "must be Number, not str"),
    "other ranks": (lambda c: c.update(rows=[0, 1, 2]), "its ranks are 1, with batches"),
    "a random state": (lambda c: value(c, "random").pop("cpu"), "random state is not one that can be set here"),
    "a lost tensor": (lambda c: value(c, "random").update(cpu={"$tensor": "x"}), "has a tensor 'x' that is nowhere"),
    "two swapped": (swap, r"has model.0.weight as .*'F32', \[4, 4\].* the manifest says"),
    "a swapped value": (
        lambda c: value(c, "random").update(cpu={"$tensor": "model.0.weight"}),
        "random has a tensor 'model.0.weight' that is nowhere, or of something else",
    ),
    "a rate": (lambda c: value(c, "optimizer")["groups"][0].update(lr="x"), r"\['lr'\] is 0.1 here, and 'x' in"),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_manifest_that_was_edited_with_its_checksum_is_refused(sharded: Sharded, saved: Path, what: str) -> None:
    change, expected = EDITS[what]
    edit(saved / "step-1" / "manifest.json", change)
    unchanged(sharded, lambda: sharded.load(saved), expected)


def test_what_a_later_version_adds_is_passed_over(sharded: Sharded, saved: Path) -> None:
    edit(saved / "step-1" / "manifest.json", lambda content: (content.update(more=1), tensor(content).update(more=1)))
    assert sharded.load(saved) == 1


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """The manifest as somebody makes it who knows its format."""
    text = path.read_bytes()
    found = SUM.search(text)
    assert found is not None
    content = json.loads(text[found.end() : -2])
    change(content)
    body = json.dumps(content).encode()
    head = text[: found.end()].replace(found[1], hashlib.sha256(body).hexdigest().encode())
    path.write_bytes(head + body + b"}\n")


def other_layout(folder: Path) -> Path:
    build(0).export(folder / "weights")
    return folder / "weights"


def made(path: Path) -> Path:
    path.write_text("text")
    return path


NONE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (lambda folder: made(folder / "file"), "file is a file. Give the folder"),
    "below a file": (lambda folder: made(folder / "file") / "run", "cannot be read: Not a directory"),
    "a checkpoint itself": (lambda folder: folder / "run" / "step-1", r"a checkpoint itself.*load\('.*/run', step=1\)"),
    "weights": (
        other_layout,
        "no checkpoints of this package, but model.safetensors.*fsdp-compiled convert .* --to ours",
    ),
}


@pytest.mark.parametrize("what", NONE)
def test_what_is_no_folder_of_checkpoints_is_not_taken_for_an_empty_one(
    sharded: Sharded, saved: Path, what: str
) -> None:
    place, expected = NONE[what][0](saved.parent), NONE[what][1]
    unchanged(sharded, lambda: sharded.load(place), expected)


def test_a_link_to_what_is_gone_is_not_taken_for_an_empty_folder(sharded: Sharded, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    unchanged(sharded, lambda: sharded.load(tmp_path / "link"), "a link to .*gone, which is not there")
    unchanged(sharded, lambda: sharded.load(""), "folder is ''; expected a path")
    assert sharded.load(tmp_path / "never made") is None
    (tmp_path / "step-5").write_text("text")
    unchanged(sharded, lambda: sharded.save(tmp_path, step=5, replace=True), "step-5 is a file. Remove it")


@pytest.mark.parametrize("how", ["frozen", "left out"])
def test_state_of_what_is_no_longer_trained_is_not_left_out_in_silence(saved: Path, how: str) -> None:
    other = build(1, frozen=True) if how == "frozen" else build(1, lambda model: model[1].parameters())
    unchanged(other, lambda: other.load(saved), "the optimizer's state of 0.weight, which is not updated here")
    assert other.load(saved, strict=False) == 1
