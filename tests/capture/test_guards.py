"""What a trace took for granted is asked at every call: each thing changed, against eager PyTorch in the same test."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import guarded
from tests.guarded import Part, batch, pair
from tests.launch import launch


def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def other_forward(self: Part, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(self.inner(x))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda m: setattr(m, "temp", 3.0), "model.temp == 1.0, which is 3.0 now"),
    "dropout": (lambda m: setattr(m.drop, "p", 1.0), "model.drop.p == 0.0, which is 1.0 now"),
    "dictionary": (lambda m: m.options.__setitem__("a", 3.0), "model.options['a'] == 1.0, which is 3.0 now"),
    "list": (lambda m: m.sizes.append(3.0), "model.sizes"),
    "list entry": (lambda m: m.sizes.__setitem__(0, 3.0), "model.sizes[0] == 1.0, which is 3.0 now"),
    "function": (lambda m: setattr(m, "act", torch.sin), "model.act"),
    "eval of a part": (lambda m: m.norm.eval(), "model.norm.training"),
    "replaced module": (lambda m: setattr(m, "drop", nn.Tanh()), "model.drop"),
    "hook": (lambda m: m.part.inner.register_forward_hook(hook), "model.part.inner.forward_hooks"),
    "hook of the model": (lambda m: m.register_forward_hook(hook), "hooks"),
    "pre-hook of the model": (lambda m: m.register_forward_pre_hook(lambda _, x: (x[0] * 2,)), "hooks"),
    "forward of an instance": (lambda m: setattr(m.part, "forward", lambda x: x * 2), "model.part"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_seen(change: str, caplog: pytest.LogCaptureFixture) -> None:
    sharded, plain = pair()
    sharded.step(*batch())
    plain()
    sharded.step(*batch())
    before = plain()
    assert sharded.captures == 1
    make, said = CHANGES[change]
    make(sharded.model)
    make(plain.model)  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, "fsdp_compiled"):
        values = [(sharded.step(*batch()), plain()) for _ in range(2)]
    for ours, theirs in values:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert sharded.captures == 2
    assert said in caplog.text
    assert not torch.allclose(values[0][1], before, rtol=1e-3)  # else the change changes nothing


GLOBALS: dict[str, tuple[str, Any, int]] = {
    "number": ("SCALE", 5.0, 2),
    "tensor": ("WEIGHTS", torch.tensor([3.0, 4.0]), 1),
    "tensor of another shape": ("WEIGHTS", torch.tensor([3.0]), 2),
}


@pytest.mark.parametrize("change", GLOBALS)
def test_globals_are_read_as_they_are_now(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value, captures = GLOBALS[change]
    sharded, plain = pair()
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    monkeypatch.setattr(guarded, name, value)
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == captures


def test_a_class_that_gets_another_forward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, plain = pair()
    torch.testing.assert_close(sharded.step(*batch()), plain())
    monkeypatch.setattr(Part, "forward", other_forward)
    torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 2


def test_a_replaced_module_with_parameters_is_refused() -> None:
    sharded, _ = pair()
    sharded.step(*batch())
    sharded.model.head = nn.Linear(6, 2)
    with pytest.raises(ValueError, match=r"head\.weight was replaced after compile_sharded"):
        sharded.step(*batch())


DISAGREEMENTS = {
    "one_rank_new": "after model.temp changed",
    "one_rank_known": "after model.temp changed",
    "other_values": "The program differs between rank 0 and rank 1",
    "one_rank_hook": "after model.head.forward_hooks changed",
}


@pytest.fixture(scope="module")
def answers() -> Any:
    return launch(Path(__file__).parents[1] / "workers" / "guards.py", 2, "all_alike", *DISAGREEMENTS)


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_what_one_rank_alone_changed_is_an_error_on_every_rank(answers: Any, case: str) -> None:
    for answer in answers[case]:
        assert answer.get("error") == "RankError", answer
        assert DISAGREEMENTS[case] in answer["message"]
        assert answer["notes"] == ["unchanged: True"]


def test_what_all_ranks_change_compiles_once_a_value(answers: Any) -> None:
    assert [answer["result"]["captures"] for answer in answers["all_alike"]] == [2, 2]
