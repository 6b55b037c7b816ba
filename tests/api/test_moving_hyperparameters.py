"""Hyperparameters that move between steps, by schedulers or by hand: the traced update is the eager one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn, optim

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim.hyperparameters import hyper, signature, with_numbers
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.optim.trial import initial
from tests.chosen import examples

# By class, what moves, within which bounds.
BETAS = st.tuples(st.floats(0.5, 0.95), st.floats(0.8, 0.999))
RATE, SMALL, DECAY = st.floats(1e-3, 0.1), st.floats(1e-9, 1e-3), st.floats(0.0, 0.3)
MOVING: dict[Any, dict[str, Any]] = {
    optim.AdamW: {"lr": RATE, "betas": BETAS, "eps": SMALL, "weight_decay": DECAY},
    optim.Adam: {"lr": RATE, "betas": BETAS, "eps": SMALL, "weight_decay": DECAY},
    optim.NAdam: {"lr": RATE, "betas": BETAS, "eps": SMALL, "weight_decay": DECAY},
    optim.Adamax: {"lr": RATE, "betas": BETAS, "eps": SMALL, "weight_decay": DECAY},
    optim.SGD: {"lr": RATE, "momentum": st.floats(0.1, 0.99), "weight_decay": DECAY},
    optim.RMSprop: {"lr": RATE, "momentum": st.floats(0.1, 0.99), "alpha": st.floats(0.5, 0.99), "eps": SMALL},
    optim.Adagrad: {"lr": RATE, "eps": SMALL, "weight_decay": DECAY},
    optim.Adadelta: {"lr": RATE, "rho": st.floats(0.5, 0.99), "eps": SMALL},
}
Moves = list[dict[str, Any]]


def differing(make: Any, moves: Moves, dtype: torch.dtype = torch.float32, follow: bool = True) -> float:
    """By how much the rule's steps and the class's own part. ``follow``: whether the rule is given what moves."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(7, 21).to(dtype))
    mine, eager = parameter.detach().clone().reshape(-1), make([parameter])
    twin = make([nn.Parameter(parameter.detach().clone())])
    (group,) = twin.param_groups
    state: list[torch.Tensor] | None = None
    traced, update, rule = None, None, None
    for move in moves:
        gradient = torch.randn(7, 21).to(dtype)
        eager.param_groups[0].update(move)
        if follow:
            group.update(move)
        if signature(group) != traced:
            (rule,), traced = make_rules(twin), signature(group)
            update = fx.GraphModule(nn.Module(), rule.trace(dtype, mine.device))
        assert rule is not None and update is not None and rule.eagerly is None
        if state is None:
            state = [initial(entry, mine) for entry in rule.state]
        hypers = [torch.tensor(hyper(group, name), dtype=torch.float64) for name in rule.hypers]
        with torch.no_grad():
            update(mine, gradient.reshape(-1).clone(), *state, *hypers)
        parameter.grad = gradient
        eager.step()
    return (mine.double() - parameter.detach().reshape(-1).double()).abs().max().item()


@pytest.mark.parametrize("kind", MOVING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("noted", [False, True], ids=["by hand", "cyclic"])
def test_whatever_moves_it_is_the_eager_update(kind: Any, noted: bool) -> None:
    """``noted``: as OneCycleLR and CyclicLR leave their bounds in the group, so that momentum or beta1 is read anew."""
    if noted and not {"betas", "momentum"} & MOVING[kind].keys():
        pytest.skip("has no momentum that those could move")

    def make(parameters: Any) -> optim.Optimizer:
        optimizer = kind(parameters, **({"momentum": 0.5} if "momentum" in MOVING[kind] else {}), foreach=False)
        if noted:
            optimizer.param_groups[0]["max_momentum"] = 0.95
        return optimizer  # type: ignore[no-any-return]

    @settings(max_examples=examples(2, 10), deadline=None, derandomize=True)
    @given(st.lists(st.fixed_dictionaries(MOVING[kind]), min_size=3, max_size=5))
    def check(moves: Moves) -> None:
        assert differing(make, moves) == 0

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", [optim.lr_scheduler.OneCycleLR, optim.lr_scheduler.CyclicLR])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_cycles_of_rate_and_momentum(kind: Any, schedule: Any, dtype: torch.dtype) -> None:
    def made(parameters: Any) -> optim.Optimizer:
        options = {"momentum": 0.9} if kind is optim.SGD else {}
        optimizer = kind(parameters, lr=0.01, **options, foreach=False)
        plans[id(parameters[0])] = (
            schedule(optimizer, 0.1, total_steps=9)
            if schedule is optim.lr_scheduler.OneCycleLR
            else schedule(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=True)
        )
        return optimizer  # type: ignore[no-any-return]

    plans: dict[int, Any] = {}
    source = nn.Parameter(torch.zeros(2))
    optimizer = made([source])
    moves: Moves = []
    for _ in range(8):
        moves.append({name: optimizer.param_groups[0].get(name) for name in ("lr", "betas", "momentum")
                      if name in optimizer.param_groups[0]})  # fmt: skip
        source.grad = torch.ones(2)
        optimizer.step()
        plans[id(source)].step()
    assert differing(made, moves, dtype) == 0
    assert differing(made, moves, dtype, follow=False) > 0  # the control


def test_rates_of_a_refused_step_are_forgotten() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    theirs, mine = (optim.AdamW([{"params": part.parameters()} for part in one], lr=0.1) for one in (plain, model))
    sharded = compile_sharded(model, mine, loss=lambda m, x: m(x).square().mean(), policy=Policy(lower="eager"))
    x = torch.randn(3, 4)
    for step in range(3):
        if step == 1:
            mine.param_groups[0]["lr"], mine.param_groups[1]["lr"] = 0.5, None
            with pytest.raises(TypeError):
                sharded.step(x)
            mine.param_groups[0]["lr"] = mine.param_groups[1]["lr"] = 0.1
        sharded.step(x)
        theirs.zero_grad()
        plain(x).square().mean().backward()
        theirs.step()
    for name, value in sharded.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_a_whole_number_may_become_another_number() -> None:
    """As the rate of a rank that has run out does, which is another one's."""
    assert with_numbers({"lr": 1, "power": (2, 0.5)}, {"lr": 0.5, "power[0]": 3.0}) == {"lr": 0.5, "power": (3, 0.5)}


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.RMSprop])
def test_a_rate_that_is_a_tensor_is_computed_with_in_its_dtype(kind: Any) -> None:
    options = {} if kind is optim.AdamW else {"momentum": 0.9}

    def make(parameters: Any) -> optim.Optimizer:
        return kind(parameters, lr=torch.tensor(0.05), foreach=False, **options)  # type: ignore[no-any-return]

    assert differing(make, [{"lr": torch.tensor(rate)} for rate in (0.05, 0.03, 0.017, 0.01)]) == 0
