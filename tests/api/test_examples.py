"""The scripts under examples/ print with this package's `fully_shard` what they print with FSDP2's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chosen import chosen, selected
from tests.launch import ROOT, launch

WORKER = Path(__file__).parents[1] / "workers" / "examples.py"
FOLDER = ROOT / "examples"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "toy"))
ON_FOUR = ("replicas",)
ON_TWO = tuple(name for name in NAMES if name not in ON_FOUR)
# Where several forwards come before one backward, the last bit may differ (docs/fully_shard.md).
ROUNDED = ("adversarial", "preferences")
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


# Loops of the others' kinds are in test_fully_shard.
CHOSEN = ("plain_loop", "checkpoint", "preferences")


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    return launch(WORKER, 2, *{"plain_loop", *selected(request, "name", "printed")}, "plain_loop:broken")


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in NUMBER.findall(line)]


@pytest.mark.parametrize("name", chosen(ON_TWO, CHOSEN))
def test_an_example_prints_what_it_prints_with_fsdp2(printed: dict[str, list[str]], name: str) -> None:
    ours, theirs = printed[f"{name} ours"], printed[f"{name} FSDP2"]
    assert len(ours) >= 4 and len(numbers(ours)) >= 4
    if name in ROUNDED:
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-6)
    else:
        assert ours == theirs


@pytest.mark.exhaustive  # replicas are in test_fully_shard
def test_an_example_with_replicas_does_so_on_four_ranks() -> None:
    for name in ON_FOUR:
        printed = launch(WORKER, 4, name)
        ours, theirs = printed[f"{name} ours"], printed[f"{name} FSDP2"]
        assert len(numbers(ours)) >= 4
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-6)


def test_another_rate_is_told_apart(printed: dict[str, list[str]]) -> None:
    assert numbers(printed["plain_loop broken"]) != pytest.approx(numbers(printed["plain_loop FSDP2"]), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_how_it_is_run_and_is_short(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert re.search(rf"^torchrun --nproc-per-node \d examples/{name}\.py$", text, re.MULTILINE)
    assert len(text.splitlines()) <= 70
    assert f"{name}.py" in (ROOT / "docs" / "fully_shard.md").read_text()
