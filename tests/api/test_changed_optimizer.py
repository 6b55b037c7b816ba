"""What of an optimizer is changed after compile_sharded, besides its groups: followed, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from tests.toys import squares

EAGER = Policy(lower="eager", shard="zero1")


class Flagged(optim.Optimizer):
    """Reads a flag, a dictionary, a list, an object and its defaults; counts in an attribute and in its groups."""

    sign = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.1})
        self.flag, self.table, self.row, self.config = True, {"scale": 1.0}, [1.0], Config()
        self.config.power = 1.0
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: Any, g: Any, group: dict[str, Any]) -> None:
        if self.flag:
            p.mul_(1 - group["lr"] * self.defaults["decay"])
        scale = self.table["scale"] * self.row[0] / self.count**self.config.power / group["step"]
        p.add_(g.sign() if self.sign else g, alpha=-group["lr"] * scale)


class WholeFlagged(Flagged):
    """Asks for shapes, so that it gets whole parameters; scales by what it saw of all of them, if it is told to."""

    total = False

    def update(self, p: Any, g: Any, group: dict[str, Any]) -> None:
        if p.dim() < 3:
            super().update(p, g, group)
        if self.total:
            self.seen = getattr(self, "seen", 0.0) + float(g.norm())
            p.mul_(self.seen)


class Config:
    power: float


def _update(self: Any, p: Any, g: Any, group: dict[str, Any]) -> None:
    p.add_(g, alpha=-0.5 * group["lr"])


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda optimizer: setattr(optimizer, name, value)


CHANGES: dict[str, Callable[[Any], object]] = {
    "defaults": lambda o: o.defaults.update(decay=0.5),
    "dictionary": lambda o: o.table.update(scale=0.3),
    "list": lambda o: o.row.__setitem__(0, 0.3),
    "object": lambda o: setattr(o.config, "power", 0.0),
    "attribute": _set("flag", False),
    "class attribute": lambda o: setattr(type(o), "sign", True),
    "method": lambda o: setattr(type(o), "update", _update),
}


def _pair(kind: Any) -> tuple[Any, Any, nn.Module, Any]:
    torch.manual_seed(0)
    eager, model = nn.Linear(6, 3), nn.Linear(6, 3)
    model.load_state_dict(eager.state_dict())
    theirs, mine = kind(eager.parameters()), kind(model.parameters())
    return eager, theirs, mine, compile_sharded(model, mine, loss=squares, policy=EAGER)


def _eager_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    squares(model, batch).backward()
    optimizer.step()


def _train(eager: nn.Module, theirs: Any, sharded: Any, batch: torch.Tensor | None = None) -> None:
    batch = torch.randn(4, 6) if batch is None else batch
    _eager_step(eager, theirs, batch)
    sharded.step(batch)


def _kind(base: Any = Flagged) -> Any:
    return type("Flagged", (base,), {"sign": False, "update": base.update, "__qualname__": "Flagged"})


@pytest.mark.parametrize("base", [Flagged, WholeFlagged])
def test_changes_of_the_optimizer_are_followed_at_the_next_step(base: Any) -> None:
    eager, theirs, mine, sharded = _pair(_kind(base))
    batch = torch.randn(4, 6)
    _train(eager, theirs, sharded, batch)
    for what, change in CHANGES.items():
        memo: dict[int, Any] = {}
        plain, other = copy.deepcopy(eager, memo), object.__new__(type(theirs))
        other.__dict__.update(copy.deepcopy(vars(theirs), memo))
        _eager_step(plain, other, batch)  # control: without the change, a step leads elsewhere
        change(theirs)
        change(mine)
        _train(eager, theirs, sharded, batch)
        found = sharded.full_state_dict()["weight"]
        torch.testing.assert_close(found, eager.weight.detach(), msg=lambda text, what=what: f"{what}: {text}")
        assert not torch.allclose(plain.weight.detach(), found, rtol=1e-4, atol=1e-5), what
    assert sharded.captures == 1


def test_an_attribute_by_which_parameters_are_mixed_is_refused() -> None:
    model = nn.Linear(6, 3)
    optimizer = WholeFlagged(model.parameters())
    sharded = compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    sharded.step(torch.ones(4, 6))
    optimizer.total = True
    for _ in range(2):  # at every call, until it is put back
        with pytest.raises(ValueError, match="WholeFlagged is not supported: how it updates a parameter depends on"):
            sharded.step(torch.ones(4, 6))
    optimizer.total = False
    sharded.step(torch.ones(4, 6))


class Scaled(WholeFlagged):
    def update(self, p: Any, g: Any, group: dict[str, Any]) -> None:
        assert p.dim() < 3
        p.add_(g, alpha=-group["lr"] * getattr(p, "scale", 1.0) - group.get("decay", 0.0))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "on shards"])
def test_what_was_noted_on_a_parameter_or_in_a_group_is_read_as_it_is(whole: bool) -> None:
    """A note that is deleted again, and a number in whose place a tensor comes."""
    eager, theirs, mine, sharded = _pair(Scaled if whole else Decays)
    batch = torch.randn(4, 6)
    for step in range(4):
        for optimizer in (theirs, mine):
            (group,) = optimizer.param_groups
            if whole and step == 1:
                group["params"][0].scale = 0.1
            elif whole and step == 2:
                del group["params"][0].scale
            elif step == 2:
                group["decay"] = torch.tensor(0.5)
        _train(eager, theirs, sharded, batch)
        torch.testing.assert_close(sharded.full_state_dict()["weight"], eager.weight.detach())


class Decays(Flagged):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["decay"] = 0.1

    def update(self, p: Any, g: Any, group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"]).mul_(1 - group["decay"])


def test_a_class_that_is_replaced_is_followed() -> None:
    eager, theirs, mine, sharded = _pair(_kind())
    _train(eager, theirs, sharded)
    other = type("Other", (Flagged,), {"update": _update})
    theirs.__class__ = mine.__class__ = other
    _train(eager, theirs, sharded)
    torch.testing.assert_close(sharded.full_state_dict()["weight"], eager.weight.detach())


def test_a_step_method_of_the_class_that_is_replaced_is_followed() -> None:
    kind = _kind()
    eager, theirs, _, sharded = _pair(kind)
    _train(eager, theirs, sharded)

    def step(self: Any, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad.sign() * 0.01)

    kind.step = step
    _train(eager, theirs, sharded)
    torch.testing.assert_close(sharded.full_state_dict()["weight"], eager.weight.detach())


def test_a_step_that_has_the_marks_of_the_one_below_it_is_what_runs() -> None:
    """``functools.wraps`` copies PyTorch's own mark of a step whose hooks run."""
    optim.AdamW([nn.Parameter(torch.ones(1))])  # the first of a class sets the mark

    class Decayed(optim.AdamW):
        @functools.wraps(optim.AdamW.step)
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.mul_(0.5)

    eager, theirs, _, sharded = _pair(Decayed)
    _train(eager, theirs, sharded)
    torch.testing.assert_close(sharded.full_state_dict()["weight"], eager.weight.detach())


def test_state_that_is_set_in_the_optimizer_is_refused_with_where_it_lives() -> None:
    eager, theirs, mine, sharded = _pair(_kind())
    _train(eager, theirs, sharded)
    mine.count = 7
    with pytest.raises(ValueError, match=r"optimizer.count was set .*sharded.state.optimizer\['group 0.count'\]"):
        sharded.step(torch.ones(4, 6))
    mine.count = 0
    mine.param_groups[0]["step"] = 7
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['step'\] was set .*\['group 0.step'\]"):
        sharded.step(torch.ones(4, 6))
    del mine.param_groups[0]["step"]
    _train(eager, theirs, sharded)
    torch.testing.assert_close(sharded.full_state_dict()["weight"], eager.weight.detach())


def test_a_step_of_the_instance_is_refused() -> None:
    model = nn.Linear(6, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=r"optimizer.step of this SGD is .*lambda.*not its class's"):
        compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    del optimizer.step
    optim.lr_scheduler.StepLR(optimizer, 2)  # puts a function there that counts calls
    sharded = compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    sharded.step(torch.ones(4, 6))
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=r"optimizer.step was replaced after compile_sharded"):
        sharded.step(torch.ones(4, 6))


def test_code_that_begins_to_ask_for_shapes_is_refused() -> None:
    class Decays(Flagged):
        def update(self, p: Any, g: Any, group: dict[str, Any]) -> None:
            if not self.flag and p.dim() > 1:
                p.mul_(0.9)
            p.add_(g, alpha=-group["lr"])

    model = nn.Linear(6, 3)
    optimizer = Decays(model.parameters())
    sharded = compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    sharded.step(torch.ones(4, 6))
    optimizer.flag = False
    with pytest.raises(RuntimeError, match=r"Decays runs as it is, on .* shards, and now its step asks for dim"):
        sharded.step(torch.ones(4, 6))


def test_a_class_of_torch_optim_whose_step_is_replaced_is_refused() -> None:
    kind = type("AdamW", (optim.AdamW,), {"__module__": "torch.optim.adamw"})
    model = nn.Linear(6, 3)
    sharded = compile_sharded(model, kind(model.parameters()), loss=squares, policy=EAGER)
    sharded.step(torch.ones(4, 6))
    kind.step = lambda self, closure=None: None
    for _ in range(2):
        with pytest.raises(ValueError, match="AdamW was changed after compile_sharded"):
            sharded.step(torch.ones(4, 6))


def test_what_is_not_part_of_the_update_is_no_change() -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    sharded = compile_sharded(model, optimizer, loss=lambda m, x: m(x).sum(), policy=EAGER)
    sharded.step(torch.ones(2, 2))
    optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.zero_grad()
    optimizer.defaults["eps"] = 1.0
    optim.AdamW(nn.Linear(2, 2).parameters())
    sharded.step(torch.ones(2, 2))
    assert sharded.captures == 1
