"""Hooks: those of forward do what they do in eager PyTorch, those of backward are refused with what does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module
from torch.nn.utils import parametrize

from fsdp_compiled import Policy, compile_sharded
from tests.toys import squares

EAGER = Policy(lower="eager")
X = torch.arange(12.0).reshape(3, 4) / 7
Handles = list[Any]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def trained_eagerly(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        squares(model, X).backward()
        optimizer.step()
    return model.state_dict()


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=squares, policy=EAGER)
    for _ in range(3):
        sharded.step(X)
    return sharded.full_state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


TRACED: dict[str, Callable[[nn.Sequential], Handles]] = {
    "forward": lambda m: [m[0].register_forward_hook(lambda _, a, out: out * 3)],
    "forward with kwargs": lambda m: [m[0].register_forward_hook(lambda _, a, k, out: out * 3, with_kwargs=True)],
    "forward, always called": lambda m: [m[0].register_forward_hook(lambda _, a, out: out * 3, always_call=True)],
    "forward-pre": lambda m: [m[2].register_forward_pre_hook(lambda _, a: (a[0] * 3,))],
    "forward-pre with kwargs": lambda m: [
        m[2].register_forward_pre_hook(lambda _, a, k: ((a[0] * 3,), k), with_kwargs=True)
    ],
    "of the root": lambda m: [
        m.register_forward_pre_hook(lambda _, a: (a[0] * 3,)),
        m.register_forward_hook(lambda _, a, out: out * 3),
    ],
    "forward of all": lambda m: [
        every_module.register_module_forward_hook(lambda one, a, out: out * 3 if linear(one) else None)
    ],
    "forward-pre of all": lambda m: [
        every_module.register_module_forward_pre_hook(lambda one, a: (a[0] * 3,) if linear(one) else None)
    ],
}


@pytest.mark.parametrize("kind", TRACED)
def test_a_forward_hook_does_what_it_does_in_eager(kind: str) -> None:
    model, without = build(), build()
    handles = TRACED[kind](model)
    try:
        expected = trained_eagerly(model)
        again = build()
        handles += TRACED[kind](again) if "of all" not in kind else []
        assert same(trained(again), expected)
    finally:
        for handle in handles:
            handle.remove()
    assert not same(trained_eagerly(without), expected)


def triple(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 3


ON_PARAMETERS: dict[str, Callable[[nn.Sequential], Any]] = {
    "register_hook": lambda m: m[2].weight.register_hook(triple),
    "register_post_accumulate_grad_hook": lambda m: m[2].weight.register_post_accumulate_grad_hook(lambda p: None),
}
ON_MODULES: dict[str, Callable[[nn.Sequential], Any]] = {
    "full backward": lambda m: m[2].register_full_backward_hook(lambda _, given, grad: (given[0] * 3,)),
    "full backward-pre": lambda m: m[2].register_full_backward_pre_hook(lambda _, grad: (grad[0] * 3,)),
    "backward": lambda m: m[2].register_backward_hook(lambda _, given, grad: None),
}
ON_ALL: dict[str, Callable[[nn.Sequential], Any]] = {
    "full backward of all": lambda m: every_module.register_module_full_backward_hook(lambda _, given, grad: None),
    "full backward-pre of all": lambda m: every_module.register_module_full_backward_pre_hook(lambda _, grad: None),
}


def refusal(register: Callable[[nn.Sequential], Any]) -> str:
    """What compile_sharded says to a model with this hook; the model is as it was, and trains as it would have."""
    model, expected = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = register(model)
    parameters = dict(model.named_parameters())
    try:
        with pytest.raises(ValueError) as caught:
            compile_sharded(model, optimizer, loss=squares, policy=EAGER)
        assert all(one is parameters[name] for name, one in model.named_parameters())
        assert optimizer.param_groups[0]["params"] == list(parameters.values())
    finally:
        handle.remove()
    assert same(trained(model), trained_eagerly(expected))
    return str(caught.value)


@pytest.mark.parametrize("kind", ON_PARAMETERS)
def test_a_hook_on_a_parameter_is_refused_before_anything_is_changed(kind: str) -> None:
    assert refusal(ON_PARAMETERS[kind]).startswith(f"2.weight has a hook ({kind}).")


@pytest.mark.parametrize("kind", ON_MODULES)
def test_a_backward_hook_on_a_module_is_refused_before_anything_is_changed(kind: str) -> None:
    assert refusal(ON_MODULES[kind]).startswith("2 (Linear) has a backward hook.")


@pytest.mark.parametrize("kind", ON_ALL)
def test_a_backward_hook_on_all_modules_is_refused_before_anything_is_changed(kind: str) -> None:
    assert refusal(ON_ALL[kind]).startswith("All modules have a backward hook")


class _Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Triple(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Triple.apply(value)


def test_the_cure_for_a_hook_on_a_parameter_does_what_the_hook_does() -> None:
    model, hooked = build(), build()
    parametrize.register_parametrization(model[2], "weight", Triple())
    hooked[2].weight.register_hook(triple)
    found, expected = trained(model), trained_eagerly(hooked)
    assert torch.equal(found["2.parametrizations.weight.original"], expected["2.weight"])
    assert not torch.equal(expected["2.weight"], trained_eagerly(build())["2.weight"])


def test_the_cure_for_a_backward_hook_does_what_the_hook_does() -> None:
    class Hooks(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[1](self[0](x))
            if x.requires_grad:
                x.register_hook(triple)
            return self[2](x)

    hooked = build()
    hooked[2].register_full_backward_hook(lambda _, given, grad: (given[0] * 3,))
    expected = trained_eagerly(hooked)
    assert same(trained(Hooks(*build())), expected)
    assert not same(trained_eagerly(build()), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_weight_norm_is_traced(wrap: Callable[[nn.Module], nn.Module]) -> None:
    def normed() -> nn.Module:
        model = build()
        wrap(model[0])
        return model

    found, expected = trained(normed()), trained_eagerly(normed())
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-7) for name in found)
