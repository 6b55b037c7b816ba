"""An object that the model and a global lead to: another one in either place is seen, as in eager PyTorch."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import compile_sharded
from fsdp_compiled.capture import object_identity
from fsdp_compiled.capture.blocks import written_blocks
from fsdp_compiled.torch_private.names import attribute
from tests.changes import beside
from tests.toys import EAGER, squares


class Options:
    def __init__(self, factor: float) -> None:
        self.factor = factor


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def scaled_by(factor: float) -> Any:
    return lambda x: x * factor


OPTIONS = Options(2.0)
TABLE, ROW, MASK = {"factor": 2.0}, [2.0], torch.full((3,), 2.0)


class Net(nn.Module):
    """Reads each object by its global name, then by an attribute's; one tensor, and one closure, by two
    attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.options, self.table, self.row, self.act, self.mask = OPTIONS, TABLE, ROW, doubled, MASK
        self.shift = self.other_shift = torch.ones(3)
        self.scale = self.other_scale = scaled_by(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * OPTIONS.factor * TABLE["factor"] * ROW[0] * MASK + self.shift
        y = self.second(doubled(y)) * self.options.factor * self.table["factor"] * self.row[0] * self.mask
        return self.scale(self.act(y)) + self.other_scale(self.other_shift)


def losses(change: Any) -> tuple[list[float], list[float], int]:
    """By eager PyTorch and here, of steps between which something is changed; how often a step was captured."""
    torch.manual_seed(0)
    model = Net()
    eager = Net()
    eager.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(eager.parameters(), 1e-6)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 1e-6), loss=squares, policy=EAGER)
    found: tuple[list[float], list[float]] = [], []
    x = torch.randn(2, 3)
    for step in range(4):
        if step == 2:
            change(model, eager)
        value = squares(eager, x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found[0].append(value.item())
        found[1].append(float(sharded.step(x)))
    return *found, sharded.captures


OTHERS: dict[str, Any] = {
    "options": Options(3.0),
    "table": {"factor": 3.0},
    "row": [3.0],
    "act": lambda x: x * 3,
    "mask": torch.full((3,), 3.0),
    "scale": scaled_by(3.0),
    "other_scale": scaled_by(3.0),
    "shift": torch.zeros(3),
    "other_shift": torch.zeros(3),
}


def _another(name: str) -> Any:
    def change(*models: nn.Module) -> None:
        for model in models:
            setattr(model, name, OTHERS[name])

    return change


@pytest.mark.parametrize("name", OTHERS)
def test_another_object_in_its_place_is_seen(name: str) -> None:
    eager, ours, captures = losses(_another(name))
    assert ours == eager and captures == 2


@pytest.mark.parametrize(
    ("name", "other"), [("MASK", torch.full((3,), 3.0)), ("MASK", torch.full((3,), 2.0)), ("OPTIONS", Options(2.0))]
)
def test_another_object_under_the_global_name_is_seen(name: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones, too: what the attribute still has may change later."""
    eager, ours, captures = losses(lambda *models: monkeypatch.setitem(globals(), name, other))
    assert ours == eager and captures == 2


def test_the_same_object_is_captured_once() -> None:
    eager, ours, captures = losses(lambda *models: None)
    assert ours == eager and captures == 1


@pytest.mark.parametrize("name", ["options", "other_scale"])
def test_control_without_the_question_it_is_not_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_identity, "asked_again", contextlib.nullcontext)
    eager, ours, captures = losses(_another(name))
    assert ours[:2] == eager[:2] and ours[2:] != eager[2:] and captures == 1


def test_dynamo_is_left_as_it_was() -> None:
    builder, _ = attribute("torch._dynamo.variables.builder.make_dupe_guard")
    before = builder.make_dupe_guard
    with object_identity.asked_again():
        assert builder.make_dupe_guard is not before
    assert builder.make_dupe_guard is before


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(3, 3), mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * self.linear(x) * self.mask


@pytest.mark.parametrize("of", [4, 5])
def test_a_tensor_of_two_equal_blocks_that_becomes_two(of: int) -> None:
    """The first of the blocks that have it is not walked through."""
    torch.manual_seed(0)
    masks = [torch.full((3,), 1.5) for _ in range(7)]
    masks[5] = masks[4]
    model, eager = (nn.Sequential(*(Masked(mask) for mask in masks)) for _ in range(2))

    def change() -> None:
        for one in (model, eager):
            one[of].mask = torch.full((3,), 0.5)  # type: ignore[assignment]

    expected, found, _ = beside(model, eager, change)
    assert found == expected


class Listed(nn.Module):
    """Its blocks, or what is in them, have a second name each: the place of a list, which is no list of modules."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.parts = parts
        self.blocks = nn.ModuleList(Masked(torch.ones(3)) for _ in range(7))
        self.others: list[Any] = [one.linear if parts else one for one in self.blocks]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for place, one in enumerate(self.others):
            x = x + place * (one if self.parts else one.linear).weight.square().mean()
        return x


@pytest.mark.parametrize(("parts", "asked"), [(True, True), (False, True), (True, False)])
def test_equal_blocks_that_have_another_name_and_take_turns_in_it(
    parts: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the third block and later ones, which are not walked through. Control: where no name is asked for."""
    if not asked:
        monkeypatch.setattr(written_blocks, "OWN_TENSOR", re.compile(""))
    torch.manual_seed(0)
    model, eager = Listed(parts), Listed(parts)

    def change() -> None:
        for one in (model, eager):
            one.others[4:6] = one.others[5], one.others[4]

    expected, found, captures = beside(model, eager, change)
    assert found[:2] == expected[:2] and (found[2:] == expected[2:]) is asked
    assert captures == 1 + asked
