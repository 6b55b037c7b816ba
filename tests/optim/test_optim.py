"""Every element-wise optimizer, traced on flat shards, against the same optimizer run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn, optim

from fsdp_compiled.optim.hyperparameters import hyper, scheduled, signature
from fsdp_compiled.optim.rules import make_rules

CPU = torch.device("cpu")

ELEMENTWISE: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "weight_decay": 0.3, "maximize": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adam, {"weight_decay": 0.1, "foreach": True}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.Rprop, {}),
    (optim.RAdam, {}),
    (optim.ASGD, {"weight_decay": 0.1, "t0": 3}),
]
# These branch on the step count in Python: their branch-free form rounds its scalars in another order.
BRANCHING = (optim.RAdam, optim.ASGD)


def _run_rule(optimizer: optim.Optimizer, gradients: list[torch.Tensor], rates: list[float]) -> torch.Tensor:
    (rule,) = make_rules(optimizer)
    parameter = optimizer.param_groups[0]["params"][0].detach().clone()
    state = {
        entry.name: torch.full((), entry.initial, dtype=entry.dtype)
        if entry.scalar
        else torch.full_like(parameter, entry.initial)
        for entry in rule.state
    }
    graph = rule.trace(parameter.dtype, CPU)
    update = fx.GraphModule(nn.Module(), graph)
    for gradient, rate in zip(gradients, rates, strict=True):
        hypers = [torch.tensor(rate, dtype=torch.float64) for _ in rule.hypers]
        update(parameter, gradient.clone(), *state.values(), *hypers)
    return parameter


def _eager(kind: type[optim.Optimizer], options: dict[str, Any]) -> optim.Optimizer:
    """One parameter of 1,037 elements, with the plain implementation of the formula."""
    torch.manual_seed(0)
    plain = {name: value for name, value in options.items() if name not in ("fused", "foreach")}
    return kind([nn.Parameter(torch.randn(1037))], **plain, foreach=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_traced_update_is_the_eager_one(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    eager = _eager(kind, options)
    traced_options = options | {"lr": 0.05} if "lr" not in options else options
    (parameter,) = eager.param_groups[0]["params"]
    gradients = [torch.randn_like(parameter) for _ in range(12)]
    rate = traced_options["lr"]
    rates = [rate * (1 + index) / 12 for index in range(12)]
    eager.param_groups[0]["lr"] = rates[0]
    mine = _run_rule(_same(kind, options, parameter, rates[0]), gradients, rates)
    constant = _run_rule(_same(kind, options, parameter, rates[0]), gradients, [rate] * 12)
    for gradient, rate in zip(gradients, rates, strict=True):
        eager.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        eager.step()
    if kind in BRANCHING:
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(mine, parameter.detach())
    if kind is not optim.Rprop:  # control: a rate that is not followed shows (Rprop reads it only at its start)
        assert not torch.allclose(constant, parameter.detach(), rtol=1e-6, atol=1e-7)


def _same(
    kind: type[optim.Optimizer], options: dict[str, Any], parameter: torch.Tensor, rate: float
) -> optim.Optimizer:
    return kind([nn.Parameter(parameter.detach().clone())], **options | {"lr": rate})


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_an_optimizer_that_cannot_be_sharded_is_refused_by_name(name: str) -> None:
    kind = getattr(optim, name)
    with pytest.raises(ValueError, match=f"{name} is not supported.*its own gradient and state alone"):
        make_rules(kind([nn.Parameter(torch.randn(4, 4))]))


class _Normalised(optim.SGD):
    """A user's own optimizer that divides by the gradient's norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


def test_elementwise_is_read_off_the_code_not_off_the_name() -> None:
    (rule,) = make_rules(_Normalised([nn.Parameter(torch.randn(4))], lr=0.1))
    assert rule.whole and "does not keep every element" in (rule.eagerly or "")


def test_the_users_optimizer_is_left_as_it_was() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.randn(4))])
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    make_rules(optimizer)
    after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    assert before == after and not optimizer.state


def test_cyclic_momentum_is_scheduled_and_other_hyperparameters_are_part_of_the_signature() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.randn(4))], lr=0.1, momentum=0.9)
    (group,) = optimizer.param_groups
    assert scheduled(group) == ("lr",)
    fixed = signature(group)
    group["lr"] = 0.2
    assert signature(group) == fixed
    group["weight_decay"] = 0.2
    assert signature(group) != fixed
    optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert scheduled(group) == ("lr", "momentum")
    assert make_rules(optimizer)[0].hypers == ("lr", "momentum")
    moving = signature(group)
    group["momentum"] = 0.5
    assert signature(group) == moving and hyper(group, "momentum") == 0.5


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_a_scheduled_momentum_is_read_on_every_step(kind: type[optim.Optimizer]) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind is optim.SGD else {}
    torch.manual_seed(0)
    start = torch.randn(64)
    gradients = [torch.randn(64) for _ in range(10)]

    def build() -> tuple[optim.Optimizer, Any]:
        optimizer = kind([nn.Parameter(start.clone())], lr=0.1, **options)
        return optimizer, optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)

    eager, schedule = build()
    (parameter,) = eager.param_groups[0]["params"]
    traced, _ = build()
    (rule,) = make_rules(traced)
    mine = start.clone()
    state = {
        entry.name: torch.full((), entry.initial, dtype=entry.dtype) if entry.scalar else torch.zeros(64)
        for entry in rule.state
    }
    update = fx.GraphModule(nn.Module(), rule.trace(torch.float32, CPU))
    for gradient in gradients:
        (group,) = eager.param_groups
        hypers = [torch.tensor(hyper(group, name), dtype=torch.float64) for name in rule.hypers]
        update(mine, gradient.clone(), *state.values(), *hypers)
        parameter.grad = gradient.clone()
        eager.step()
        schedule.step()
    torch.testing.assert_close(mine, parameter.detach(), rtol=1e-6, atol=1e-7)
