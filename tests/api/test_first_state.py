"""What an optimizer's state begins from, where only the first step knows it: a rate, a gradient, beside what its
constructor made."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim import ways
from tests.own_optimizer import Own
from tests.toys import squares


class Half(Own):
    """A sum that its constructor makes, and a mean that starts from the first gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1)

    def update(self, p: Any, gradient: Any, state: Any, group: Any) -> None:
        if "mean" not in state:
            state["mean"] = gradient.clone()
        state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
        state["sum"].addcmul_(gradient, gradient)
        p.addcdiv_(state["mean"], state["sum"].sqrt(), value=-group["lr"])


class HalfGroup(Half):
    """The same sum, and a rate of the group's that starts from the first."""

    def begin(self, group: dict[str, Any]) -> None:
        group["own"] = group.get("own", group["lr"]) * 0.9

    def update(self, p: Any, gradient: Any, state: Any, group: Any) -> None:
        state["sum"].addcmul_(gradient, gradient)
        p.addcdiv_(gradient, state["sum"].sqrt(), value=-group["own"])


class Rated(Own):
    """Keeps the first rate, and counts."""

    def update(self, p: Any, gradient: Any, state: Any, group: Any) -> None:
        if not state:
            state["first_rate"], state["count"] = group["lr"], 0
        state["count"] += 1
        p.add_(gradient, alpha=-state["first_rate"] / state["count"])


class Counted(Own):
    """Counts its steps in a tensor of one element."""

    def update(self, p: Any, gradient: Any, state: Any, group: Any) -> None:
        if not state:
            state["count"] = torch.zeros(1)
        state["count"] += 1
        p.add_(gradient, alpha=-group["lr"] / state["count"].item())


class Ones(Own):
    """A mean that begins at one, and no count of steps."""

    def update(self, p: Any, gradient: Any, state: Any, group: Any) -> None:
        mean = state.setdefault("mean", torch.ones_like(p))
        mean.mul_(0.9).add_(gradient.abs(), alpha=0.1)
        p.add_(gradient / mean, alpha=-group["lr"])


KINDS: dict[str, Any] = {
    "Counted": Counted, "Ones": Ones,
    "Rprop": optim.Rprop, "ASGD": optim.ASGD, "Half": Half, "HalfGroup": HalfGroup, "Rated": Rated,
    "dampened": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
}  # fmt: skip


def _step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    squares(model, x).backward()
    optimizer.step()


def _pair(kind: Any, before: int = 0) -> tuple[nn.Module, Any, Any, Any]:
    """Two groups of other rates, of which the first changes once more before the first step of ours."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model = copy.deepcopy(plain)
    theirs, mine = (
        kind([{"params": list(one[0].parameters())}, {"params": list(one[1].parameters()), "lr": 0.02}])
        for one in (plain, model)
    )
    for _ in range(before):
        x = torch.randn(3, 4)
        _step(plain, theirs, x)
        _step(model, mine, x)
    sharded = compile_sharded(model, mine, loss=squares, policy=Policy(lower="eager"))
    for one in (theirs, mine):
        one.param_groups[0]["lr"] = 0.003
    return plain, theirs, mine, sharded


def _differs(plain: nn.Module, theirs: Any, sharded: Any) -> float:
    for _ in range(4):
        x = torch.randn(3, 4)
        sharded.step(x)
        _step(plain, theirs, x)
    found = sharded.full_state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_state_begins_as_the_optimizer_s_own_code_begins_it(kind: str, before: int) -> None:
    plain, theirs, _, sharded = _pair(KINDS[kind], before)
    assert not any(rule.whole for rule in sharded._programs.rules)
    assert _differs(plain, theirs, sharded) <= 2e-7


def test_a_parameter_without_state_beside_one_that_has_some_begins_as_the_optimizer_does() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    model = copy.deepcopy(plain)
    theirs, mine = Ones(plain.parameters()), Ones(model.parameters())
    for one, optimizer in ((plain, theirs), (model, mine)):
        one.weight.grad = torch.ones(2, 4)
        optimizer.step()
        one.weight.grad = None
    sharded = compile_sharded(model, mine, loss=squares, policy=Policy(lower="eager"))
    assert _differs(plain, theirs, sharded) <= 2e-7


def test_steps_that_begin_with_the_rate_of_the_trial_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is kept is looked at with one rate."""
    monkeypatch.setattr(ways, "_FOUND", {})
    monkeypatch.setattr(ways, "with_hyper", lambda group, *_: group)
    plain, theirs, _, sharded = _pair(optim.Rprop)
    assert _differs(plain, theirs, sharded) > 1e-3


def test_dampening_that_begins_after_the_first_step_is_refused() -> None:
    plain, theirs, mine, sharded = _pair(lambda p: optim.SGD(p, 0.1, momentum=0.9))
    assert _differs(plain, theirs, sharded) <= 2e-7
    mine.param_groups[0]["dampening"] = 0.5
    with pytest.raises(ValueError, match=r"makes only at its first step \(undamped\)"):
        sharded.step(torch.randn(3, 4))
    mine.param_groups[0]["dampening"] = 0
    assert _differs(plain, theirs, sharded) <= 2e-7


LOOKED_FOR = {
    "centered": (lambda p: optim.RMSprop(p, 1e-3), {"centered": True}, {"centered": False}),
    "momentum": (lambda p: optim.RMSprop(p, 1e-3), {"momentum": 0.9}, {"momentum": 0.0}),
    "amsgrad": (lambda p: optim.AdamW(p, 1e-3, eps=1e-3), {"amsgrad": True}, {"amsgrad": False}),
}


@pytest.mark.parametrize("kind", LOOKED_FOR)
def test_state_that_a_change_looks_for_and_no_step_made_is_refused_as_pytorch_refuses_it(kind: str) -> None:
    make, change, back = LOOKED_FOR[kind]
    plain, theirs, mine, sharded = _pair(make)
    for optimizer in (theirs, mine):
        optimizer.param_groups[0].update(change)  # before the first step, which makes it
    assert _differs(plain, theirs, sharded) <= 2e-7
    plain, theirs, mine, sharded = _pair(make)
    assert _differs(plain, theirs, sharded) <= 2e-7
    for optimizer in (theirs, mine):
        optimizer.param_groups[0].update(change)
    with pytest.raises(KeyError):  # what PyTorch says
        _step(plain, theirs, torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"was changed after its first steps, and now looks for state .* KeyError"):
        sharded.step(torch.randn(3, 4))
    for optimizer in (theirs, mine):
        optimizer.param_groups[0].update(back)
    sharded.step(torch.randn(3, 4))


def test_momentum_that_begins_later_begins_as_in_pytorch() -> None:
    plain, theirs, mine, sharded = _pair(lambda p: optim.SGD(p, 0.1))
    assert _differs(plain, theirs, sharded) <= 2e-7
    theirs.param_groups[0]["momentum"] = mine.param_groups[0]["momentum"] = 0.9
    assert _differs(plain, theirs, sharded) <= 2e-7
