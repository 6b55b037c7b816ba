"""No optimizer of these packages differs in silence: each trains as it does in eager PyTorch, or is refused by name."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest
import torch

from fsdp_compiled.optim import rules, verdicts
from tests import third_party
from tests.chosen import chosen

CHUNKS = 6


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


def test_the_comparison_finds_a_rule_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the trial made blind and a wrong number in the trace, the steps beside the class itself show it."""
    lion_pytorch = pytest.importorskip("lion_pytorch")
    before = verdicts.trace

    def doubles_the_rate(*args: object) -> object:
        found = before(*args)  # type: ignore[arg-type]
        graph = found.graph
        rate = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(rate):
            double = graph.call_function(torch.ops.aten.mul.Tensor, (rate, 2))
        double.meta = dict(rate.meta)
        rate.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)
        return found

    for place in (rules, verdicts):
        monkeypatch.setattr(place, "trace", doubles_the_rate)
    monkeypatch.setattr(verdicts, "_FOUND", {})
    monkeypatch.setattr(verdicts.Trial, "compare_all", lambda *_: None)
    monkeypatch.setattr(verdicts.Trial, "compare", lambda *_: None)
    with pytest.raises(AssertionError, match="Lion"), warnings.catch_warnings():
        third_party.verdict(lion_pytorch.Lion, {})
