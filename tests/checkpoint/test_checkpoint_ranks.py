"""Real ranks: four save, three, two and one load, by name and bit for bit; what fails on one rank fails on all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch
from tests.workers import checkpoints

WORKER = Path(checkpoints.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "checkpoints"


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return launch(WORKER, 4, str(folder), "save", timeout=200)


@pytest.fixture(scope="module")
def two(folder: Path, four: object) -> list[dict[str, Any]]:
    return launch(WORKER, 2, str(folder), "load", timeout=200)


@pytest.fixture(scope="module")
def three(folder: Path, four: object) -> list[dict[str, Any]]:
    return launch(WORKER, 3, str(folder), "load", timeout=200)


@pytest.mark.parametrize(
    "what", ["losses", "own", "random", "buffer", "ddp", "zero1", "2 x 2", "from 2 x 2", "overwritten", "dealt"]
)  # fmt: skip
def test_as_many_ranks_go_on_bit_for_bit(four: list[dict[str, Any]], what: str) -> None:
    assert [rank[what] for rank in four] == [True] * 4


@pytest.mark.parametrize("world", ["two", pytest.param("three", marks=pytest.mark.exhaustive)])
def test_other_numbers_of_ranks_load_the_same(world: str, request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(world))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_process_loads_the_same(folder: Path, four: object) -> None:
    check([checkpoints.load(folder)])


def check(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["step"] == 4 and rank["equal"] and not rank["control"]
        assert rank["far"] < 1e-5
        assert rank["count"] == 7
        assert rank["from dcp"] == {"ddp": True, "zero1": True, "2 x 2": True}
        assert rank["exported"] == {"ddp": True, "zero1": True, "2 x 2": True, "whole": True}
        counted, apart, alike = rank["dealt"]
        for told in (counted, alike):
            assert f"deals examples out to {len(ranks)} ranks" in told and "each of 4 had taken" in told
        assert "was saved with another state on each of 4 ranks" in apart
        assert rank["generated"] == {str(seed): [True, False] for seed in checkpoints.SEEDS}
        assert "was saved with another state on each of 4 ranks" in rank["refused"]
    assert len({rank["drawn"] for rank in ranks}) == len(ranks)  # ranks that drew other numbers still do


ARGUMENTS = "RankError: The ranks called with different arguments, so nothing was done"
FAILED = {
    "steps": (ARGUMENTS, ARGUMENTS),
    "load": (ARGUMENTS, ARGUMENTS),
    "extra": ("RankError: rank 1 failed", "ValueError: extra x.value is a builtins.object"),
    "result": ("SaveError: The checkpoint of step 70", "SaveError: The checkpoint of step 70"),
    "next step": ("SaveError: The checkpoint of step 71", "SaveError: The checkpoint of step 71"),
    "copying": ("SaveError: The checkpoint of step 72", "SaveError: The checkpoint of step 72"),
    "after": ("nothing", "nothing"),
    "undone": ("RankError: rank 1 failed", "ArithmeticError: odd"),
    "twice": ("ValueError: Another Sharded of this process", "RankError: rank 0 failed"),
    "synced": ("SaveError: The checkpoint of step 3", "SaveError: The checkpoint of step 3"),
}


@pytest.mark.parametrize("what", FAILED)
def test_what_fails_on_one_rank_is_an_error_on_both(two: list[dict[str, Any]], what: str) -> None:
    for found, expected in zip([rank[what] for rank in two], FAILED[what], strict=True):
        assert found.startswith(expected)
    if what == "copying":
        assert all("rank 1: MemoryError: no host memory" in rank[what] for rank in two)
    if what in ("result", "next step"):
        assert all("rank 1: No space left on device" in rank[what] for rank in two)


def test_what_failed_has_changed_nothing(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["left"] == [".lock", f"step-{checkpoints.LAST}"]
        assert rank["back"] and rank["kept"]
        assert (
            rank["first"] and rank["newest"] == 3 and "is there and complete, but its folder cannot" in rank["synced"]
        )
        assert "step-80/manifest.json does not begin as a manifest" in rank["damaged"]


def test_every_element_is_written_once(folder: Path, four: object) -> None:
    for place in (folder / "step-4", folder / "square" / "step-4"):
        content = json.loads((place / "manifest.json").read_text())["content"]
        entry = content["tensors"]["model.embed.weight"]
        assert sum(math.prod(sizes) for _, sizes, *_ in entry["pieces"]) == checkpoints.WORDS * checkpoints.WIDTH
        assert len({file["name"] for file in content["files"]}) == 4
