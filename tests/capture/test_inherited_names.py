"""A class that gets a name of its own which it inherited when the model was traced; and an object that gets one which
its class looked for elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_compiled.capture.looked_up_names import AbsentNames, Methods, looks_elsewhere
from tests.changes import beside


class Base:
    factor = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Options(Base):
    pass


class BaseBlock(nn.Module):
    power = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.options, self.kind = nn.Linear(3, 3), Options(), Options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.options.scaled(self.linear(x)) ** self.power + self.kind.factor


class Block(BaseBlock):
    pass


def losses(change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, int]:
    model, eager = (nn.Sequential(Block(), Block()) for _ in range(2))
    return beside(model, eager, lambda: change(monkeypatch))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "attribute": lambda patch: patch.setattr(Options, "factor", 3.0),
    "attribute of a module's class": lambda patch: patch.setattr(Block, "power", 3),
    "method": lambda patch: patch.setattr(Options, "scaled", lambda self, x: x * 5),
    "forward": lambda patch: patch.setattr(Block, "forward", lambda self, x: self.linear(x)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours, captures = losses(CHANGES[change], monkeypatch)
    assert eager[2] != eager[1] and ours == eager and captures == 2


def test_control_where_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Methods, "_shadowed", lambda _: None)
    eager, ours, captures = losses(CHANGES["attribute of a module's class"], monkeypatch)
    assert ours[1] == eager[1] and ours[2] != eager[2] and captures == 1


def test_other_names_compile_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nobody inherited; and what `copy.deepcopy` leaves on classes."""

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Options, "more", 1, raising=False)
        for kind in (Base, Options, BaseBlock, Block):
            copy.deepcopy(kind())

    eager, ours, captures = losses(change, monkeypatch)
    assert ours == eager and captures == 1


class Elsewhere:
    def __init__(self) -> None:
        self.options = Options()

    def __getattr__(self, name: str) -> Any:
        if name == "options":
            raise AttributeError(name)
        return getattr(self.options, name)


class Wrapped(nn.Module):
    """Equal blocks under `checkpoint_wrapper`, which looks for names in the block; they hold an object that does so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(5))
        for layer in self.layers:
            layer._checkpoint_wrapped_module.options = Elsewhere()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) / 10).tanh() * layer.power  # far from 1, where no change would show
        return x


def forwarded(change: Callable[[Any], Any], before: Callable[[Any], Any] = lambda _: None) -> tuple[Any, Any, int]:
    """Of a block that is not walked through, since others are like it."""
    torch.manual_seed(0)
    models = Wrapped(), Wrapped()
    for model in models:
        before(model.layers[3])
    return beside(*models, lambda: [change(model.layers[3]) for model in models])


FORWARDED: dict[str, Callable[[Any], Any]] = {
    "number": lambda layer: setattr(layer, "power", 0.3),
    "of an object": lambda layer: setattr(layer.options, "scaled", torch.negative),
}


@pytest.mark.parametrize("change", FORWARDED)
def test_a_name_that_was_found_elsewhere_is_seen(change: str) -> None:
    eager, ours, captures = forwarded(FORWARDED[change])
    assert eager[2] != eager[1] and ours == pytest.approx(eager, rel=1e-6) and captures == 2
    eager, ours, captures = forwarded(lambda _: None, before=FORWARDED[change])  # a block that was never like others
    assert ours == pytest.approx(eager, rel=1e-6) and captures == 1


def test_control_where_names_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AbsentNames, "changed", lambda *_: None)
    eager, ours, captures = forwarded(FORWARDED["number"])
    assert ours[1] == pytest.approx(eager[1]) and ours[2] == ours[1] != eager[2] and captures == 1


def test_whose_names_are_asked() -> None:
    assert looks_elsewhere(type(checkpoint_wrapper(nn.Identity()))) and looks_elsewhere(Elsewhere)
    assert not any(map(looks_elsewhere, (nn.Linear, Options, type(torch.ops.aten), type(torch), dict, torch.Tensor)))
