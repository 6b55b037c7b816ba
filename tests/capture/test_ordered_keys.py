"""The order of an `OrderedDict` that a model goes through, and that its owner changes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled.capture import guards
from fsdp_compiled.capture.blocks.walked_blocks import WalkedBlock
from tests.changes import beside
from tests.chosen import needs_torch


class Ordered(OrderedDict[str, float]):
    pass


TABLE: OrderedDict[Any, float] = OrderedDict()


class Block(nn.Module):
    def __init__(self, table: OrderedDict[Any, float] | None) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for value in (TABLE if self.table is None else self.table).values():
            x = torch.tanh(x) + value
        return self.linear(x)  # type: ignore[no-any-return]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = torch.tanh(expert(x))
        return x


def losses(
    tables: list[OrderedDict[Any, float]], moved: OrderedDict[Any, float]
) -> tuple[list[float], list[float], int]:
    """By eager PyTorch and here; before the third of four steps the first key is moved to the end."""
    torch.manual_seed(0)
    model, eager = (nn.Sequential(*(Block(None if one is TABLE else one) for one in tables)) for _ in range(2))
    return beside(model, eager, lambda: moved.move_to_end(next(iter(moved))))


KEYS: list[Any] = ["a", torch.float32, (1, 2)]


@pytest.mark.parametrize("which", ["attribute", "global", "subclass", "of a block like others", "other keys"])
def test_another_order_is_seen(which: str) -> None:
    keys = KEYS if which == "other keys" else list("abc")
    made = [  # enough that the last blocks are written by the second, and not walked through
        (Ordered if which == "subclass" else OrderedDict)(zip(keys, (0.1, 0.2, 0.3), strict=True)) for _ in range(7)
    ]
    TABLE.clear()
    TABLE.update(zip(keys, (0.1, 0.2, 0.3), strict=True))
    tables = [TABLE] if which == "global" else made if which == "of a block like others" else made[:1]
    eager, ours, captures = losses(tables, tables[-1])
    assert eager[2] != eager[1] and ours == eager and captures == 2


def test_control_without_the_question_it_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "has_equals", lambda *_: False)
    table = OrderedDict(a=0.1, b=0.2)
    eager, ours, captures = losses([table], table)
    assert ours[:2] == eager[:2] and ours[2:] != eager[2:] and captures == 1


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "control"])
def test_another_order_of_modules_in_a_block_like_others_is_seen(noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a plain dictionary's: Dynamo's own guard on its keys."""
    if not noted:
        needs_torch((2, 12), "its Dynamo asks for these keys in their order by itself")
    begin = WalkedBlock.__init__

    def without(self: WalkedBlock, *given: Any) -> None:
        begin(self, *given)
        self.ordered = []

    if not noted:
        monkeypatch.setattr(WalkedBlock, "__init__", without)
    torch.manual_seed(0)
    model, eager = (nn.Sequential(*(Experts() for _ in range(7))) for _ in range(2))

    def change() -> None:
        for one in (model, eager):
            modules = one[5].experts._modules
            modules["0"] = modules.pop("0")

    expected, found, _ = beside(model, eager, change)
    assert found[:2] == expected[:2] and (found[2:] == expected[2:]) is noted
