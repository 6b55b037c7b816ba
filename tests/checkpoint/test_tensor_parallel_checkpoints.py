"""Checkpoints under tensor parallelism: 2 x 2 ranks save; 1 x 4, 4 x 1, 2 ranks without tp and one process load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch
from tests.workers import tensor_parallel_checkpoints as worker

WORKER = Path(worker.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tp") / "checkpoints"


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return launch(WORKER, 4, str(folder), "save", timeout=300)


def test_what_is_saved_is_what_eager_pytorch_has(four: list[dict[str, Any]]) -> None:
    state, losses = four[0]["eager"]
    assert state < 1e-3 and losses < 1e-5  # AdamW turns the last bit of a gradient near zero into a part of a step


@pytest.mark.parametrize("what", ["same mesh", "bit for bit", "random", "own"])
def test_the_same_mesh_goes_on_bit_for_bit(four: list[dict[str, Any]], what: str) -> None:
    assert [rank[what] for rank in four] == [True] * 4
    assert not four[0]["control"] and not four[0]["other parts"]


@pytest.mark.parametrize("mesh", ["1 x 4", "4 x 1"])
def test_other_meshes_load_the_same(four: list[dict[str, Any]], mesh: str) -> None:
    for rank in four:
        assert rank[mesh] and rank["far"] < 1e-5
        assert "was saved with another state on each of 4 ranks" in rank[f"{mesh} refused"]


@pytest.mark.parametrize("way", ["1 x 4 -> 4 x 1", "4 x 1 -> 2 x 2", "dcp", "export", "whole", "replicas"])
def test_every_way_leads_to_the_same(four: list[dict[str, Any]], way: str) -> None:
    assert [rank[way] for rank in four] == [True] * 4


def test_two_ranks_without_tp_load_the_same(folder: Path, four: object) -> None:
    check(launch(WORKER, 2, str(folder), "load", timeout=300))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_process_loads_the_same(folder: Path, four: object) -> None:
    check([worker.load(folder)])


def check(ranks: list[dict[str, Any]]) -> None:
    assert not ranks[0]["control"]
    for place, rank in enumerate(ranks):
        assert rank["step"] == worker.BEFORE
        assert all(rank[what] for what in ("equal", "replicas", "dcp", "dcp of replicas", "export"))
        assert rank["far"] < 1e-5
        assert rank["own"] == (place if len(ranks) == 2 else -1)  # as many batches of their own as there were


def test_every_element_is_written_once(folder: Path, four: object) -> None:
    for place in (folder / "step-2", folder / "replicas" / "step-2"):
        content = json.loads((place / "manifest.json").read_text())["content"]
        for name, dim, cuts in (("model.tokens.weight", 0, 2), ("model.down.weight", 1, 2), ("model.down.bias", 0, 1)):
            entry = content["tensors"][name]
            assert sum(math.prod(sizes) for _, sizes, *_ in entry["pieces"]) == math.prod(entry["shape"])
            each = entry["shape"][dim] // cuts
            parts = {(at[dim] // each, (at[dim] + size[dim] - 1) // each) for at, size, *_ in entry["pieces"]}
            assert parts == {(part, part) for part in range(cuts)}
        # Of ranks that hold the same, each writes a part.
        writers = {file for entry in content["tensors"].values() for _, _, file, *_ in entry["pieces"]}
        assert len(writers) == 4
