"""Results of a forward of `fully_shard` that are what was given, a buffer or one another, as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.runtime.fsdp import module_call
from fsdp_compiled.runtime.programs import result_aliases


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bank", torch.ones(3, 4))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count.add_(1)
        y = self.linear(x) + self.bank.sum(0)
        return (
            y, y.t(), y, y.clone(), self.bank, self.bank[1:], self.bank.clone(), self.bank.t()[0], x, x.view(4, 2),
            x.detach(), x + 0,
        )  # fmt: skip


def relations(results: tuple[torch.Tensor, ...], *others: torch.Tensor) -> list[list[bool]]:
    """Which of them share memory."""
    every = [one.untyped_storage().data_ptr() for one in (*results, *others)]
    return [[one == other for other in every] for one in every]


@pytest.fixture
def both() -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = Net()
    return eager, fully_shard(copy.deepcopy(eager))


@pytest.mark.parametrize("gradient", [True, False])
def test_who_shares_memory_with_whom(both: tuple[Any, Any], gradient: bool) -> None:
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(gradient):
        found = [relations(net(x), x, net.bank) for net in both]
    assert found[0] == found[1]


@pytest.mark.parametrize("gradient", [True, False])
def test_a_write_to_a_result_is_one_to_the_other(both: tuple[Any, Any], gradient: bool) -> None:
    seen = []
    for net in both:
        x, values = torch.ones(2, 4), []
        for _ in range(2):
            with torch.set_grad_enabled(gradient):
                y, _, _, _, bank, rows, *_, same, view, _, _ = net(x)
            bank.mul_(0.9)
            rows.add_(1)
            view.mul_(2)
            values += [y.sum().item(), same.sum().item(), net.bank.sum().item(), net.count.sum().item()]
        seen.append(values)
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
    assert same is x


class Writes(Net):
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x) * self.bank.clone().sum(0)
        return y, self.write(self.bank, y.detach().sum(0))


WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "added to": lambda bank, _: bank.add_(1),
    "filled": lambda bank, _: bank.fill_(3.0),
    "through data": lambda bank, _: (bank.data.mul_(0.5), bank)[1],
    "a part of it": lambda bank, y: (bank[1:].lerp_(y, 0.5), bank[:2])[1],
    "copied to": lambda bank, y: (bank.copy_(y), bank.t())[1],
    "what was copied": lambda bank, y: (bank.copy_(new := (y * 2).expand(3, 4).contiguous()), new)[1],
    "equal to it": lambda bank, _: (bank + 1, bank.add_(1))[0],
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_buffer_that_forward_writes_and_returns_is_the_buffer(how: str) -> None:
    """The loop writes to what it got, and keeps it: the next forward reads that, and writes to what was kept."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        net: Any = Writes(WRITTEN[how])
        net = fully_shard(net) if sharded else net
        kept, seen = [], list[Any]()
        for step in range(4):
            with torch.set_grad_enabled(step != 3):
                y, bank = net(torch.ones(2, 4))
            if step != 3:
                y.sum().backward()
            with torch.no_grad():
                bank.mul_(2)
            kept.append(bank)
            seen.append(y.sum().item())
        seen += [one.sum().item() for one in kept] + relations((*kept,), net.bank)
        found.append(seen)
    assert found[1][:8] == pytest.approx(found[0][:8], rel=1e-5) and found[1][8:] == found[0][8:]


def test_gradients_pass_through_each_of_them(both: tuple[Any, Any]) -> None:
    found = []
    for net in both:
        x = torch.ones(2, 4).requires_grad_()
        y, turned, again, clone, *_, same, view, _, more = net(x * 1)
        loss = y.sum() + 2 * turned[0].sum() + 3 * again[1].sum() + 5 * clone.mean()
        (loss + 7 * same[0].sum() + 11 * view[1].sum() + 13 * more.sum()).backward()
        weight = net.linear.weight.grad
        found.append((x.grad, weight.full_tensor() if hasattr(weight, "full_tensor") else weight))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def _hooked(y: torch.Tensor) -> torch.Tensor:
    view = y.view(-1)
    if view.requires_grad:
        view.register_hook(lambda gradient: 5 * gradient)
    return view


def _unseen(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return y[-1]


RETURNED: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "detached": lambda x, y: (y, y.detach()),
    "detached first": lambda x, y: (y.detach(), y),
    "a view of it": lambda x, y: (y.detach().t(), y, y.t().detach(), y[1:]),
    "its data": lambda x, y: (y, y.data),
    "no gradient": lambda x, y: (y, _unseen(y)),
    "input": lambda x, y: (y, x.detach(), x, x.data[0]),
    "reversed": lambda x, y: (y, Reversed.apply(y)),
    "reversed first": lambda x, y: (Reversed.apply(y), y),
    "reversed twice": lambda x, y: (y, Reversed.apply(y), Reversed.apply(Reversed.apply(y)).t()),
    "reversed input": lambda x, y: (y, Reversed.apply(x), x),
    "hooked": lambda x, y: (y, _hooked(y)),
    "read after": lambda x, y: (y.sigmoid(), y, y.view(-1), y.detach()),
}


class Returns(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 4), name

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return RETURNED[self.name](x, self.linear(x))


@pytest.mark.parametrize("name", RETURNED)
def test_a_result_has_the_gradient_that_is_its_own_and_the_memory_of_another(name: str) -> None:
    torch.manual_seed(0)
    eager = Returns(name)
    found = []
    for net in (eager, fully_shard(copy.deepcopy(eager))):
        given = nn.Parameter(torch.linspace(-1, 1, 8).view(2, 4))
        for _ in range(2):
            results = net(given * 1)
            loss = sum((place + 2) * (one * one.detach().cos()).sum() for place, one in enumerate(results))
            loss.backward()
        weight = net.linear.weight.grad
        found.append((
            # (Of a view that was made without gradients PyTorch says what its base is.)
            [one.requires_grad for one in results if name != "no gradient"],
            relations(results) if "reversed" not in name and name != "hooked" else None,
            [*results, given.grad, weight.full_tensor() if hasattr(weight, "full_tensor") else weight],
        ))  # fmt: skip
    assert found[0][:2] == found[1][:2]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(one, other)


def test_control_views_that_autograd_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_aliases, "_joins", lambda tangent: ["the same for all"])
    with pytest.raises(AssertionError):
        test_a_result_has_the_gradient_that_is_its_own_and_the_memory_of_another("reversed")


def test_control_all_are_copies(both: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_call, "shared", lambda values, *_: values)
    x = torch.randn(2, 4)
    found = [relations(net(x), x, net.bank) for net in both]
    assert found[0] != found[1]
