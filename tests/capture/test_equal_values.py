"""Values that are equal to what a trace read, and are not the same; and keys of which Dynamo asks the number alone."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import CaptureError, fully_shard
from fsdp_compiled.capture import guards, object_identity
from fsdp_compiled.capture.object_identity import EqualValues, check_text, has_equals
from tests.changes import beside
from tests.chosen import TORCH, needs_torch

TEXT = "text of a value"
MISREAD = "its Dynamo writes an OrderedDict as a dict: refused"
LISTS = torch.__version__ >= "2.13"  # Dynamo asked the keys of ``list(table)`` itself before


DATACLASS = "text of a dataclass"


@dataclass
class Named:
    name: str


READ: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {  # what is read first, what is then, and how
    "zero": (0.0, -0.0, lambda held: held),
    "complex": (complex(1, 0.0), complex(1, -0.0), lambda held: held.imag),
    "zero in a tuple": ((0.0, 1), (-0.0, 1), lambda held: held[0]),
    "zero in a list": ([0.0], [-0.0], lambda held: held[0]),
    "zero in a dict": ({"a": 0.0}, {"a": -0.0}, lambda held: held["a"]),
    "number in a tuple": ((2, 1), (2.0, 1), lambda held: held[0]),
    "number in a tuple of tuples": (((2,), 1), ((2.0,), 1), lambda held: held[0][0]),
    "number in a set": ({2}, {2.0}, lambda held: next(iter(held))),
    "key": ({2: 1}, {2.0: 1}, lambda held: sorted(held)[0]),
    "key in a list of keys": ({2: 1}, {2.0: 1}, lambda held: list(held).pop()),
    "another key in a list of keys": ({2: 1}, {3: 1}, lambda held: list(held).pop()),
    "another key in a display": ({2: 1}, {3: 1}, lambda held: [*held].pop()),
    "another name in a list of keys": ({"a": 1}, {"bc": 1}, lambda held: len(list(held).pop())),
    "text of a dictionary": ({"a": 1}, {"a": 1, "b": 2}, lambda held: len(str(held))),
    TEXT: (OrderedDict(a=1), OrderedDict(a=222), lambda held: len(f"{held}")),
    "text of a dictionary in a list": ([{"a": 1}], [{"a": 1, "b": 2}], lambda held: len("%s" % held)),  # noqa: UP031
    DATACLASS: (Named("a"), Named("longer"), lambda held: len(str(held))),
}


class Block(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.drop, self.held, self.read = nn.Linear(3, 3), nn.Dropout(0.0), held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.read(self.held)
        sign = torch.copysign(torch.ones_like(x), x.abs() * number)
        half = (torch.full((3,), 5, dtype=torch.int64) * number).is_floating_point()
        return self.drop(self.linear(x)) * sign + (1.0 if half else number)


def losses(kind: str, blocks: int, changed: int) -> tuple[list[float], list[float], int]:
    """By eager PyTorch and here; before the third of five steps a block holds the other value, and the first again
    before the fourth."""
    first, other, read = READ[kind]
    torch.manual_seed(0)
    models = [nn.Sequential(*(Block(first, read) for _ in range(blocks))) for _ in range(2)]

    def holds(value: Any) -> None:
        for one in models:
            one[changed].held = value  # type: ignore[assignment]

    return beside(*models, lambda: holds(other), lambda: holds(first))


@pytest.mark.parametrize("kind", READ)
def test_it_is_seen(kind: str) -> None:
    if kind == TEXT:
        needs_torch((2, 13), MISREAD)
    if kind == DATACLASS and TORCH >= (2, 14):
        pytest.skip("its Dynamo refuses, by name, the text of a dataclass")
    eager, ours, captures = losses(kind, 1, 0)
    assert eager[2] != eager[1] and ours == eager and captures == 2


@pytest.mark.parametrize("kind", ["zero", "number in a tuple", "another key in a list of keys", TEXT])
def test_in_a_block_like_others_it_is_seen(kind: str) -> None:
    """Which is written, and not walked through."""
    if kind == TEXT:
        needs_torch((2, 13), MISREAD)
    eager, ours, captures = losses(kind, 7, 5)
    assert eager[2] != eager[1] and ours == eager and captures == 2


@pytest.mark.parametrize(
    "kind", ["zero", "number in a tuple", "key", "text of a dictionary", *["another key in a list of keys"] * LISTS]
)
def test_control_without_the_question_it_is_not_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "has_equals", lambda *_: False)
    monkeypatch.setattr(guards, "has_text", lambda *_: False)
    monkeypatch.setattr(object_identity, "ConstDictVariable", ())
    eager, ours, captures = losses(kind, 1, 0)
    assert ours[:2] == eager[:2] and ours[2] != eager[2] and captures == 1


def test_nothing_is_asked_of_other_numbers_nor_of_modules_of_pytorch() -> None:
    assert not any(has_equals(one, "CONSTANT_MATCH") for one in (1.0, 3, True, 0, "a", ("a", None), torch.float32))
    assert not has_equals({"a": 0.0}, "DICT_KEYS_MATCH")
    model = nn.Sequential(nn.LayerNorm(3), nn.Dropout(0.0))
    values = EqualValues()
    for name, value in {"m[0].normalized_shape": (3,), "m[1].p": 0.0, "m[0].eps": 0.0}.items():
        values.note(name, value, "CONSTANT_MATCH")
    model[0].eps = 0.0
    assert values.changed({"m": model}) is None and list(values.read) == ["m[0].eps"]
    model[0].eps = -0.0
    assert values.changed({"m": model}) == "m[0].eps"


@pytest.mark.parametrize("held", [OrderedDict(a=1), {"a": [OrderedDict(b=1)]}, [defaultdict(int, a=1)]])
def test_a_text_that_older_releases_write_otherwise_is_refused_there(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a plain dictionary, and a newer release."""
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(CaptureError, match=r"model.held.* writes it otherwise than Python.*\n  Cure: use PyTorch 2.13"):
        check_text("model.held", held)
    check_text("model.held", {"a": [1], "b": Named("a")})
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    check_text("model.held", held)


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="a trace writes them as Python does")
def test_it_is_refused() -> None:
    model = fully_shard(Block(OrderedDict(a=1), READ[TEXT][2]))
    with pytest.raises(CaptureError, match="writes it otherwise than Python"):
        model(torch.ones(2, 3))


def test_how_hooks_are_called_is_no_text_of_the_models() -> None:
    """These tables are in an `OrderedDict` of each module, and are fixed when a hook is registered."""
    model = nn.Sequential(Block({"a": 1}, READ[TEXT][2]))
    model[0].register_forward_pre_hook(lambda module, args, named: None, with_kwargs=True)
    expected = model(torch.ones(2, 3))
    assert torch.equal(fully_shard(model)(torch.ones(2, 3)), expected)
