"""No optimizer of these packages differs in silence: each trains as it does in eager PyTorch, or is refused by name."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest

from fsdp_compiled.optim import ways
from fsdp_compiled.runtime import shard_update
from tests import third_party
from tests.chosen import chosen

CHUNKS = 12


def _expected(package: str) -> list[str]:
    text = third_party.TABLE.read_text()
    head = f"{third_party.PACKAGES[package]} {importlib.metadata.version(third_party.PACKAGES[package])}\n\n"
    if head not in text:
        pytest.skip(f"the table is of another version than {head.strip()}: python -m tests.third_party")
    return text.split(head)[1].split("\n\n")[0].splitlines()


MORE = [False, pytest.param(True, marks=pytest.mark.exhaustive)]  # options that may change the answer


def _agrees(package: str, more: bool, place: int = 0, chunks: int = 1) -> None:
    pytest.importorskip(package)
    names = list(third_party.classes(package))[place::chunks]
    expected = _expected(package)
    starts = {line.split()[0]: index for index, line in enumerate(expected) if not line.startswith(" ")}
    found = list(third_party.rows(package, names, more))
    wanted = []
    for name in names:
        wanted.append(expected[starts[name]])
        for line in expected[starts[name] + 1 :]:
            if not line.startswith(" "):
                break
            wanted += [line] * more
    assert found == wanted


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("place", chosen(range(CHUNKS), [0]))
def test_pytorch_optimizer(place: int, more: bool) -> None:
    _agrees("pytorch_optimizer", more, place, CHUNKS)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("package", ["optimi", "lion_pytorch", "schedulefree"])
def test_others(package: str, more: bool) -> None:
    _agrees(package, more)


def test_the_comparison_finds_an_update_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the trial made blind and a step that is made twice, the steps beside the class itself show it."""
    lion_pytorch = pytest.importorskip("lion_pytorch")
    step = shard_update.step_on_shards
    monkeypatch.setattr(shard_update, "step_on_shards", lambda *given: [step(*given), step(*given)])
    monkeypatch.setattr(ways.Trial, "compare", lambda *_: None)
    with pytest.raises(AssertionError, match="Lion"), warnings.catch_warnings():
        third_party.verdict(lion_pytorch.Lion, {})
