"""Hooks on parameters of `fully_shard`: called as in eager PyTorch, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from tests.fully_shard_loops import X, full, loss_of, plain_gradients, same
from tests.toys import net


def test_gradients_that_are_asked_for_go_to_who_asked() -> None:
    model = fully_shard(net())
    parameters = list(model.parameters())
    assert same(full(torch.autograd.grad(loss_of(model), parameters)), plain_gradients())
    assert all(one.grad is None for one in parameters)
    loss_of(model).backward(inputs=[parameters[0]])
    assert [one.grad is None for one in parameters] == [False, True, True, True]
    with pytest.raises(RuntimeError, match="no derivative of its backward program"):
        torch.autograd.grad(loss_of(model), parameters, create_graph=True)


def test_hooks_on_parameters_run() -> None:
    model = fully_shard(net())
    first, second, *_ = model.parameters()
    seen = []
    first.register_hook(lambda gradient: gradient * 2)
    second.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.full_tensor()))
    loss_of(model).backward()
    expected = plain_gradients()
    assert same([first.grad.full_tensor(), *seen], [expected[0] * 2, expected[1]])


def test_hooks_of_what_no_result_depends_on_are_not_called() -> None:
    """Autograd calls those of each input of a function with None where there is no gradient."""
    model = fully_shard(net())
    weight = model[-1].weight
    weight.register_hook(lambda gradient: gradient * 2)
    loss_of(model).backward()
    assert same([weight.grad.full_tensor()], [plain_gradients()[-2] * 2])
    model[-1].forward = lambda given: given[:, :2]
    model.zero_grad()
    loss_of(model).backward()
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss_of(model), [weight])
    assert torch.autograd.grad(loss_of(model), [weight, model[0].weight], allow_unused=True)[0] is None


class Two(nn.Module):
    """Of two results, one does not depend on the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return hidden, self.head(hidden)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_what_a_backward_does_not_reach_are_refused(register: str) -> None:
    """Autograd would call them, with None, or after an update of an older gradient."""
    model, seen = fully_shard(Two()), []
    getattr(model.head.weight, register)(lambda given: seen.append(given) or None)
    sum(one.sum() for one in model(X)).backward()
    assert len(seen) == 1
    hidden, _ = model(X)
    with pytest.raises(RuntimeError, match="weight has a hook"):
        hidden.sum().backward()
    assert len(seen) == 1
    hidden, result = model(X)
    (hidden.sum() + 0 * result.sum()).backward()
    assert len(seen) == 2


def test_hooks_after_a_gradient_are_not_called_while_it_is_held_back() -> None:
    model = fully_shard(net())
    weight, seen = model[-1].weight, []
    weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.full_tensor().clone()))
    for synchronises in (True, False, True):
        model.set_requires_gradient_sync(synchronises)
        loss_of(model).backward()
    model.set_requires_gradient_sync(True)
    expected = plain_gradients()[-2]
    assert len(seen) == 2 and torch.allclose(torch.stack(seen), torch.stack([expected, 3 * expected]))
    late = loss_of(model)
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="weight has a hook"):
        late.backward()


def test_hooks_see_gradients_that_were_held_back() -> None:
    """By a backward without synchronisation, and sent with one that does not reach the parameter."""
    model = fully_shard(net())
    weight = model[-1].weight
    weight.register_hook(lambda gradient: gradient * 2)
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    assert weight.grad is None
    model.set_requires_gradient_sync(True)
    late = loss_of(model)
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="weight has a hook"):
        late.backward()
    model.set_requires_gradient_sync(True)
    forward, model[-1].forward = model[-1].forward, lambda given: given[:, :2]
    loss_of(model).backward()
    model[-1].forward = forward
    assert same([weight.grad.full_tensor()], [plain_gradients()[-2] * 2])
