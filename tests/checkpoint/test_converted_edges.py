"""Formats of others at their edges: numbers and ties that go through DCP, and files of weights that were edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.checkpoint.convert import convert

X = torch.arange(6).view(2, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))  # a number itself: so is its optimizer's state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)) * self.scale


def build(seed: int, kind: Any = torch.optim.AdamW) -> Sharded:
    torch.manual_seed(seed)
    model = Tied()
    sharded = compile_sharded(
        model,
        kind(model.parameters(), lr=0.01),
        loss=lambda model, x: model(x).square().mean(),
        policy=Policy(lower="eager"),
    )
    sharded.step(X)
    return sharded


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_ties_and_numbers_of_an_optimizer_come_back_from_dcp(tmp_path: Path, kind: Any) -> None:
    first, second = build(0, kind), build(1, kind)
    first.step(X)
    first.save(tmp_path / "ours", wait=True)
    convert(tmp_path / "ours", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "ours")
    assert second.load(tmp_path / "back") == 2
    for _ in range(2):
        assert torch.equal(first.step(X), second.step(X))
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(first.state), tree_leaves(second.state), strict=True))


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        text = path.read_bytes()
        length = int.from_bytes(text[:8], "little")
        entries = json.loads(text[8 : 8 + length])
        changed = change(entries)
        new = json.dumps(entries if changed is None else changed).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + text[8 + length :])

    return edit


def entry(**new: Any) -> Callable[[Path], None]:
    return header(lambda entries: entries["head.weight"].update(new))


def index(text: str) -> Callable[[Path], None]:
    return lambda path: (path.parent / "model.safetensors.index.json").write_text(text) and None


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


EDITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "before the tensors": (entry(data_offsets=[-96, 0]), "is no safetensors file, or damaged"),
    "in another tensor": (entry(data_offsets=[4, 100]), "is no safetensors file, or damaged"),
    "whole numbers": (entry(dtype="I32"), r"is float32\[6, 4\] here, and int32\[6, 4\] in the checkpoint"),
    "half a number": (entry(shape=[4.0, 6]), "is no safetensors file, or damaged"),
    "no entry": (header(lambda entries: entries.update({"head.weight": 5})), "is no safetensors file, or damaged"),
    "a list": (header(lambda entries: [1]), "is no safetensors file, or damaged"),
    "longer": (longer, "is no safetensors file, or damaged"),
    "an index of numbers": (index('{"weight_map": {"a": 5}}'), "names 5, which is no file of its folder"),
    "an index of folders": (index('{"weight_map": {"a": ".."}}'), "names '..', which is no file"),
    "an index of nothing": (index('{"weight_map": null}'), "is no index of weights"),
}


@pytest.fixture(scope="module")
def sharded() -> Sharded:
    return build(0)


@pytest.mark.parametrize("what", EDITS)
def test_edited_weights_are_refused_by_name(sharded: Sharded, tmp_path: Path, what: str) -> None:
    weights = {"head.weight": torch.ones(6, 4), "embed.weight": torch.ones(6, 4), "scale": torch.tensor(2.0)}
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    EDITS[what][0](path)
    before = [one.clone() for one in tree_leaves(sharded.state)]
    with pytest.raises(ValueError, match=EDITS[what][1]):
        sharded.import_weights(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, tree_leaves(sharded.state), strict=True))
