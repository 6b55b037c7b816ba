"""Fused optimizers over parameters of `fully_shard` run on local tensors, and leave what plain tensors do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_compiled import fully_shard
from fsdp_compiled.runtime.fsdp import local_updates
from fsdp_compiled.torch_private.dtensor import handlers
from tests.chosen import TORCH
from tests.toys import net

Make = Callable[[Any], torch.optim.Optimizer]


class Own(torch.optim.AdamW):
    """An optimizer of the user's around PyTorch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] *= 0.5
        return super().step(closure)


MADE: dict[str, Make] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, maximize=True, fused=True),
    "tensor rate": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.02), fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True),
    "own": lambda model: Own(model.parameters(), fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": [one], "lr": 0.01 * (place + 1)} for place, one in enumerate(model.parameters())], fused=True
    ),
}


def give_gradients(model: nn.Module, step: int, without: int | None = None) -> None:
    """The same to whole and sharded parameters, and none to one of them."""
    generator = torch.Generator().manual_seed(step)
    for place, one in enumerate(model.parameters()):
        value = torch.randn(one.shape, generator=generator)
        gradient = one.detach() * 0 + distributed(value, one)
        one.grad = None if place == without else gradient


def distributed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


def train(model: nn.Module, make: Make) -> list[torch.Tensor]:
    """With rates that a schedule moves, state that is saved and loaded, a copy, and a group that comes later."""
    first, *_, last = model.parameters()
    optimizer = make(model)
    extra = nn.Parameter(last.detach().clone())
    for step in range(6):
        # A fused SGD reads momentum where there was no gradient yet, with plain tensors too.
        give_gradients(model, step, step % 3 if not isinstance(optimizer, torch.optim.SGD) else None)
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(model)
            optimizer.load_state_dict(state)
        if step == 3:
            optimizer.add_param_group({"params": [extra], "lr": 0.5})
        if step >= 3:
            extra.grad = torch.ones_like(extra)
        if step == 4:
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.1
            optimizer.state[first]["mine"] = 1
        optimizer.step()
    values = [*model.parameters(), extra]
    states = [value for one in values for value in optimizer.state[one].values() if isinstance(value, torch.Tensor)]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in (*values, *states)]


@pytest.mark.parametrize("name", MADE)
def test_it_leaves_what_it_leaves_with_plain_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "adagrad" and TORCH < (2, 13):
        pytest.skip("PyTorch's own Adagrad has no state for a group that comes later")
    ran = []
    usual = local_updates.LocalUpdates.__call__

    def counting(self: Any, operator: Any, args: Any, named: Any) -> Any:
        found = usual(self, operator, args, named)
        ran.append(self._known != [])
        return found

    monkeypatch.setattr(local_updates.LocalUpdates, "__call__", counting)
    expected = train(net(), MADE[name])
    assert not ran  # plain tensors are no business of ours
    sharded = train(fully_shard(net()), MADE[name])
    assert len(sharded) == len(expected) and all(map(torch.equal, sharded, expected))
    assert all(ran) and (len(ran) >= 6) == (name != "foreach")
    assert not left_behind(), "they outlived the step"


def left_behind() -> list[Any]:
    return [one for one in handlers().values() if isinstance(one, local_updates.LocalUpdates)]


def test_another_rate_is_told_apart() -> None:
    """The broken control."""
    one, other = (
        train(fully_shard(net()), lambda model, rate=rate: torch.optim.AdamW(model.parameters(), rate, fused=True))
        for rate in (1e-3, 1.0001e-3)
    )
    assert not all(map(torch.equal, one, other))


def test_other_placements_go_dtensors_own_way() -> None:
    model = fully_shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    give_gradients(model, 0)
    optimizer.step()
    known = local_updates._updates[optimizer]
    assert len(known._known) == 1
    before = [one.full_tensor().clone() for one in model.parameters()]
    give_gradients(model, 0)
    for one in model.parameters():
        one.grad = one.grad.redistribute(placements=[Replicate()])
    optimizer.step()
    assert len(known._known) == 1  # these are not cut alike, and are not taken for it
    assert not any(torch.equal(one.full_tensor(), old) for one, old in zip(model.parameters(), before, strict=True))


def test_a_step_that_raises_leaves_others_as_they_are() -> None:
    model, plain = fully_shard(net()), net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for one in (model, plain):
        give_gradients(one, 0)
    theirs.step()
    assert not left_behind()
    optimizer.step()
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_step_of_another_optimizer_can_be_compiled() -> None:
    fully_shard(net())
    plain, eager = net(), net()
    optimizer, expected = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, eager))
    for one in (plain, eager):
        give_gradients(one, 0)
    torch.compile(lambda: optimizer.step(), backend="eager")()
    expected.step()
    for one, other in zip(plain.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other)  # torch 2.11 compiles it with another rounding
