"""A compile_sharded that is refused leaves model, optimizer and random state as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.live_parameters import Net, X, loss
from tests.taken_over import build


def described(model: Net, optimizer: torch.optim.Optimizer) -> Any:
    """All that compile_sharded could change, by identity or bit for bit."""
    tables = [
        {name: {key: id(one) for key, one in value.items()} if isinstance(value, dict) else value
         for name, value in vars(module).items()}
        for module in model.modules()
    ]  # fmt: skip
    tensors = [
        (type(p), p.tolist(), p.requires_grad, p.grad, p._backward_hooks)
        for p in model.state_dict(keep_vars=True).values()
    ]
    groups = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    state = {
        id(p): {name: (id(value), value.tolist()) for name, value in one.items()} for p, one in optimizer.state.items()
    }
    return tables, tensors, groups, state, sorted(vars(optimizer)), torch.get_rng_state().tolist()


def failing(_name: str, _module: nn.Module) -> bool:
    raise KeyError("of the user's")


REFUSALS: dict[str, tuple[Callable[[Net, torch.optim.Optimizer], Any], type[Exception]]] = {
    "a loss that is no function": (lambda m, o: compile_sharded(m, o, loss="mse"), ValueError),  # type: ignore[arg-type]
    "units that match nothing": (lambda m, o: compile_sharded(m, o, units=["none.*"]), ValueError),
    "units that raise": (lambda m, o: compile_sharded(m, o, units=failing), KeyError),
    "an optimizer of another model": (
        lambda m, o: compile_sharded(m, torch.optim.SGD(build()[0].parameters(), lr=0.1)), ValueError
    ),
    "an optimizer that is not element-wise": (
        lambda m, o: compile_sharded(m, torch.optim.LBFGS(m.parameters())), ValueError
    ),
    "state that differs inside a group": (lambda m, o: compile_sharded(m, aged(m, o)), ValueError),
    "a hook": (lambda m, o: compile_sharded(hooked(m), o), ValueError),
    "offload on a CPU": (lambda m, o: compile_sharded(m, o, policy=Policy(offload=True)), ValueError),
}  # fmt: skip


def aged(model: Net, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.state[model.scale]["step"] += 1
    return optimizer


def hooked(model: Net) -> Net:
    if not model.scale._backward_hooks:
        model.scale.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_compile_sharded_leaves_everything_as_it_was(refusal: str) -> None:
    model, optimizer = build()
    loss(model, X).backward()
    optimizer.step()
    act, kind = REFUSALS[refusal]
    if refusal == "state that differs inside a group":
        aged(model, optimizer)
        act = lambda m, o: compile_sharded(m, o)  # noqa: E731
    if refusal == "a hook":
        hooked(model)
    before = described(model, optimizer)
    with pytest.raises(kind):
        act(model, optimizer)
    assert described(model, optimizer) == before
    model.scale.data += 1
    assert described(model, optimizer) != before
