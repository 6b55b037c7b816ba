"""Tensors that a trace took for granted, of the batch, of modules and closed over, are read as they are now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import compile_sharded, fully_shard
from tests.guarded import EAGER, batch, mse, pair


def is_same(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * (3.0 if x is y else 1.0)


def test_one_tensor_given_twice_is_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=is_same, policy=EAGER)
    x = torch.randn(5, 6)
    for given in ((x, x), (x, x.clone()), (x, x)):
        value, gradients = sharded.value_and_grad(*given)
        theirs = is_same(plain, *given)
        torch.testing.assert_close(value, theirs.detach())
        (expected,) = torch.autograd.grad(theirs, [plain.weight])
        torch.testing.assert_close(gradients["weight"].view(2, 6), expected)
    assert sharded.captures == 2


def asks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * (3.0 if x.requires_grad else 1.0)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * (3.0 if x.requires_grad else 1.0)


def test_a_batch_that_requires_a_gradient_is_refused_where_it_would_be_lost() -> None:
    torch.manual_seed(0)
    model = Asks()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=asks, policy=EAGER)
    x = torch.randn(5, 6)
    torch.testing.assert_close(sharded.value_and_grad(x)[0], asks(plain, x).detach())
    with pytest.raises(ValueError, match=r"batch\[0\] requires a gradient.*detach"):
        sharded.value_and_grad(x.clone().requires_grad_())
    with torch.no_grad():
        for given in (x, x.clone().requires_grad_()):
            torch.testing.assert_close(sharded(given), plain(given))


def test_a_replaced_buffer_is_read_and_written_as_it_is_now() -> None:
    sharded, plain = pair()
    torch.testing.assert_close(sharded.step(*batch()), plain())
    for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
        model.offset = torch.tensor([1.0, 2.0])
        model.norm.running_mean = torch.full((6,), 0.5)
        model.norm.register_buffer("running_var", torch.full((6,), 2.0))
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    full = sharded.full_state_dict()
    for name, value in plain.model.named_buffers():  # type: ignore[attr-defined]
        torch.testing.assert_close(full[name], value)
    assert sharded.captures == 1
    for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
        model.offset = torch.tensor([3.0])
    torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 2


def test_a_replaced_buffer_is_the_states_at_once() -> None:
    """Nothing is called between the replacement and the reading."""
    sharded, _ = pair()
    sharded.model.norm.running_mean = torch.full((6,), 0.5)  # type: ignore[union-attr]
    assert sharded.full_state_dict()["norm.running_mean"].tolist() == [0.5] * 6
    sharded.model.norm.running_mean = torch.full((6,), 0.25)  # type: ignore[union-attr]
    assert sharded.state.buffers["norm.running_mean"].tolist() == [0.25] * 6


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((6,), factor))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.factor + self.calls


@pytest.mark.parametrize("face", ["compile_sharded", "fully_shard"])
def test_modules_without_parameters_that_are_replaced_or_moved_bring_their_buffers(face: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Scale(1.0), nn.Sequential(nn.Tanh(), Scale(3.0)), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    if face == "fully_shard":
        fully_shard(model)
    else:
        sharded = compile_sharded(model, loss=mse, policy=EAGER)

    def swap(one: Any) -> None:
        one[0], one[1][1] = one[1][1], one[0]

    changes: list[Callable[[Any], Any]] = [
        lambda one: None, swap, lambda one: one[1].__setitem__(1, Scale(5.0)),
        lambda one: one.__setitem__(0, one[1][1]), lambda one: one.__setitem__(1, nn.Sequential(nn.Tanh(), Scale(7.0))),
    ]  # fmt: skip
    for change in changes:
        for one in (model, plain):
            change(one)
        for _ in range(2):
            found = mse(model, *batch()) if face == "fully_shard" else sharded.value_and_grad(*batch())[0]
            torch.testing.assert_close(found, mse(plain, *batch()), rtol=0, atol=0)
        assert [float(value.sum()) for value in model.buffers()] == [float(value.sum()) for value in plain.buffers()]


@pytest.mark.parametrize("face", ["compile_sharded", "fully_shard"])
def test_a_buffer_that_was_replaced_before_a_refused_call_is_read_after_it(face: str) -> None:
    model = nn.Sequential(Scale(1.0), nn.Linear(6, 2))
    plain = copy.deepcopy(model)
    if face == "fully_shard":
        call = fully_shard(model)
    else:
        call = compile_sharded(model, policy=EAGER)
    x, _ = batch()
    torch.testing.assert_close(call(x).detach(), plain(x).detach())
    for one in (model, plain):
        one[0].factor = torch.full((6,), 7.0)
    with pytest.raises(ValueError, match=r"The batch holds a builtins\.object"):
        call(object())
    torch.testing.assert_close(call(x).detach(), plain(x).detach())


TENSORS: dict[str, Callable[[Any], Any]] = {
    "a teacher's parameter": lambda m: setattr(
        m.teacher[0], "weight", nn.Parameter(torch.ones(2, 6), requires_grad=False)
    ),
    "a teacher": lambda m: m.teacher.__setitem__(0, nn.Linear(6, 2).requires_grad_(False)),
    "an attribute": lambda m: setattr(m, "mask", torch.arange(6.0)),
    "an entry": lambda m: m.tensors.__setitem__("shift", torch.ones(2)),
}


@pytest.mark.parametrize("change", TENSORS)
def test_closed_over_tensors_are_read_as_they_are_now(change: str) -> None:
    sharded, plain = pair()
    torch.testing.assert_close(sharded.step(*batch()), plain())
    for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
        torch.manual_seed(7)
        TENSORS[change](model)
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 1


class Keeps(nn.Module):
    """Its attribute is state: forward reads and writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.h = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x) + self.h
        self.h = (0.5 * self.h + y.mean(0)).detach()
        return y


def test_state_that_forward_keeps_starts_anew_where_the_user_sets_it() -> None:
    sharded, plain = pair(Keeps)
    rows = (5, 5, 3, 5)  # another program, which writes the same state
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.01)  # type: ignore[attr-defined]
    for count, call in enumerate(rows):
        if count in (2, 3):
            for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
                model.h = torch.full((2,), float(count))
        x, y = (part[:call] for part in batch())
        optimizer.zero_grad()
        theirs = mse(plain.model, x, y)  # type: ignore[attr-defined]
        theirs.backward()
        optimizer.step()
        torch.testing.assert_close(sharded.step(x, y), theirs.detach())
    assert sharded.captures == 2
