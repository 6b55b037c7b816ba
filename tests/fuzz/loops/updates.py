"""Steps of optimizers, and what is done to gradients between a backward and an update."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

from tests.fuzz.loops.sides import Side, whole
from tests.fuzz.loops.steps import step

# A large epsilon: where a gradient is rounding alone, its sign decides over a step.
MADE = {
    "adamw": lambda given: torch.optim.AdamW(given, 1e-2, eps=1e-3),
    "sgd": lambda given: torch.optim.SGD(given, 1e-1, momentum=0.9),
    "adam": lambda given: torch.optim.Adam(given, 1e-2, foreach=False, eps=1e-3),
    "fused": lambda given: torch.optim.AdamW(given, 1e-2, fused=True, eps=1e-3),
    "foreach": lambda given: torch.optim.AdamW(given, 1e-2, foreach=True, eps=1e-3, amsgrad=True),
    "adagrad": lambda given: torch.optim.Adagrad(given, 1e-2, eps=1e-3),
    "rmsprop": lambda given: torch.optim.RMSprop(given, 1e-3, eps=1e-3, centered=True),
    "nesterov": lambda given: torch.optim.SGD(given, 1e-1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "tensor rate": lambda given: torch.optim.AdamW(given, torch.tensor(1e-2), eps=1e-3, foreach=False),
}


def begin(side: Side, rng: random.Random) -> None:
    """One optimizer, one with two groups, or two."""
    side.make = MADE[rng.choice(list(MADE))]
    parameters = [one for _, one in side.named()]
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    how = rng.choice(("one", "one", "groups", "two"))
    if how == "one":
        side.optimizers = [side.make(parameters)]
    elif how == "groups":
        side.optimizers = [side.make([{"params": matrices}, {"params": others, "lr": 3e-2, "weight_decay": 0.0}])]
    else:
        side.optimizers = [side.make(matrices), MADE["sgd"](others)]


def _groups(side: Side) -> list[dict[str, Any]]:
    return [group for optimizer in side.optimizers for group in optimizer.param_groups]


def _one(side: Side, rng: random.Random) -> Any:
    return rng.choice(side.named())[1]


@step(4)
def optimizer_step(side: Side, rng: random.Random) -> None:
    for optimizer in side.optimizers:
        optimizer.step()


@step()
def step_with_a_closure(side: Side, rng: random.Random) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = side.loss(*batch)
        side.backward(loss)
        return loss

    batch, optimizer = side.batch(rng), side.optimizers[0]
    return optimizer.step(closure).detach()


@step(3)
def zero_grad(side: Side, rng: random.Random) -> None:
    to_none = rng.random() < 0.6
    for optimizer in side.optimizers:
        optimizer.zero_grad(set_to_none=to_none)


@step()
def zero_grad_of_the_model(side: Side, rng: random.Random) -> None:
    side.model.zero_grad(set_to_none=rng.random() < 0.5)


@step()
def clip_norm(side: Side, rng: random.Random) -> Any:
    return whole(nn.utils.clip_grad_norm_(side.model.parameters(), 0.5, foreach=rng.choice((None, False))))


@step()
def clip_value(side: Side, rng: random.Random) -> None:
    nn.utils.clip_grad_value_(side.model.parameters(), 0.01)


@step()
def clip_norm_of_a_part(side: Side, rng: random.Random) -> Any:
    return whole(nn.utils.clip_grad_norm_(side.model.layers[0].parameters(), 0.05, norm_type=rng.choice((2.0, 1.0))))


@step()
def rate(side: Side, rng: random.Random) -> None:
    for group in _groups(side):
        group["lr"] = rng.choice((float(group["lr"]) * 0.7, torch.tensor(float(group["lr"]) * 0.7)))
        if isinstance(group["lr"], torch.Tensor) and group.get("foreach"):
            group["lr"] = float(group["lr"])


@step()
def hyperparameters(side: Side, rng: random.Random) -> None:
    for group in _groups(side):
        group["weight_decay"] = 0.05
        if "betas" in group:
            group["betas"] = (0.8, 0.99)


@step()
def kind_of_loop(side: Side, rng: random.Random) -> None:
    """Foreach instead of a loop over tensors, and back."""
    wanted = rng.random() < 0.5
    for group in _groups(side):
        if not group.get("fused") and not isinstance(group["lr"], torch.Tensor):
            group["foreach"] = wanted


@step()
def new_optimizer(side: Side, rng: random.Random) -> None:
    if trained := [one for _, one in side.named() if one.requires_grad]:
        side.optimizers = [MADE[rng.choice(list(MADE))](trained)]


@step()
def another_group(side: Side, rng: random.Random) -> None:
    optimizer = side.optimizers[0]
    if len(optimizer.param_groups[0]["params"]) > 2:
        optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.05})


@step()
def schedule(side: Side, rng: random.Random) -> None:
    for group in _groups(side):
        group.pop("initial_lr", None)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.7) for one in side.optimizers]
    for optimizer, one in zip(side.optimizers, schedules, strict=True):
        optimizer.step()
        one.step()


@step()
def save_optimizers(side: Side, rng: random.Random) -> None:
    side.kept["optimizers"] = side.optimizers, [copy.deepcopy(one.state_dict()) for one in side.optimizers]


@step(2)
def load_optimizers(side: Side, rng: random.Random) -> None:
    """Into those that were saved, which train from here on."""
    if "optimizers" in side.kept:
        optimizers, states = side.kept["optimizers"]
        if [[len(g["params"]) for g in o.param_groups] for o in optimizers] == [
            [len(g["params"]) for g in s["param_groups"]] for s in states
        ]:
            side.optimizers = optimizers
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))


@step()
def gradient_none(side: Side, rng: random.Random) -> None:
    _one(side, rng).grad = None


@step()
def gradient_scaled(side: Side, rng: random.Random) -> None:
    if (one := _one(side, rng)).grad is not None:
        one.grad.mul_(2)


@step()
def gradient_replaced(side: Side, rng: random.Random) -> None:
    one, how = _one(side, rng), rng.choice(("sum", "clone", "zeros", "weight", "detach"))
    if how == "zeros":
        one.grad = torch.zeros_like(one)
    elif how == "weight":
        one.grad = one.detach().clone()
    elif one.grad is not None:
        one.grad = {"sum": one.grad + one.detach(), "clone": one.grad.clone(), "detach": one.grad.detach()}[how]


@step()
def gradients_held_by_hand(side: Side, rng: random.Random) -> None:
    """Those that were there are put aside, and added to the next."""
    before = [one.grad for _, one in side.named()]
    side.model.zero_grad()
    side.backward(side.loss(*side.batch(rng)))
    for (_, one), old in zip(side.named(), before, strict=True):
        if old is not None:
            one.grad = old if one.grad is None else one.grad.add_(old)


@step()
def gradient_that_is_held(side: Side, rng: random.Random) -> Any:
    """Who holds a gradient sees what is added to it."""
    named = [(name, one.grad) for name, one in side.named() if one.grad is not None and one.requires_grad]
    side.backward(side.loss(*side.batch(rng)))
    return [whole(gradient) for _, gradient in named]


@step()
def norms(side: Side, rng: random.Random) -> Any:
    return [whole(one.grad.norm()) for _, one in side.named() if one.grad is not None]


@step()
def foreach_on_gradients(side: Side, rng: random.Random) -> Any:
    if found := [one.grad for _, one in side.named() if one.grad is not None]:
        torch._foreach_mul_(found, 0.5)


@step()
def penalty(side: Side, rng: random.Random) -> Any:
    """A loss of weights alone, which autograd differentiates by itself."""
    one = _one(side, rng)
    if not one.requires_grad or side.hooked:
        return None
    loss = one.square().sum() * 0.1
    loss.backward()
    return whole(loss)
