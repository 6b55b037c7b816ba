"""Live parameters where a number could be another one without a word: each way is as in eager PyTorch, or refused."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.live_parameters import Net, X, build, loss

EAGER = Policy(lower="eager")


def pair(dtype: torch.dtype = torch.float32) -> tuple[Net, Sharded, Net, torch.optim.Optimizer]:
    """A model that was taken over, and an eager one."""
    model, eager = (build()[0].to(dtype) for _ in range(2))
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.01) for one in (model, eager)]
    return model, compile_sharded(model, optimizers[0], loss=loss, policy=EAGER), eager, optimizers[1]


def step(model: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor = X) -> torch.Tensor:
    optimizer.zero_grad()
    value = loss(model, x)
    value.backward()
    optimizer.step()
    return value


@contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def loads_by_swapping(model: Net) -> None:
    with swapping():
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


def weight(model: Net) -> Any:
    return model.layers[0].weight


REFUSED: dict[str, Callable[[Net], Any]] = {
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.scale, nn.Parameter(torch.tensor(9.0))),
    "load_state_dict that swaps": loads_by_swapping,
    "set_": lambda m: weight(m).set_(torch.ones(4, 4)),
    "t_": lambda m: weight(m).t_(),
    "unsqueeze_": lambda m: weight(m).unsqueeze_(0),
    "resize_": lambda m: weight(m).resize_(2, 2),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_puts_other_memory_or_another_shape_there_is_refused(way: str) -> None:
    model, sharded, eager, optimizer = pair()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"is not possible|Cannot swap"):
        REFUSED[way](model)
    assert torch.equal(sharded.step(X), step(eager, optimizer))
    assert torch.equal(weight(model), weight(eager))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_in_a_mode_is_trained_on(mode: Callable[[], Any], dtype: torch.dtype) -> None:
    model, sharded, eager, optimizer = pair(dtype)
    x = X.to(dtype)
    exact = dtype == torch.float32  # PyTorch's own SGD rounds otherwise in the tail of a tensor in bf16
    near = {"rtol": 0 if exact else 1e-2, "atol": 0 if exact else 1e-3}
    for _ in range(2):
        for one in (model, eager):
            with mode():
                weight(one).mul_(0.5)
                weight(one).data.clamp_(-0.1, 0.1)
                one.scale += 0.25
        torch.testing.assert_close(sharded.step(x), step(eager, optimizer, x), **near)
        for (name, value), other in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
            torch.testing.assert_close(value, other, **near, msg=name)


def test_a_write_between_microbatches_is_seen_by_those_that_follow() -> None:
    model, sharded, eager, optimizer = pair()
    sharded.accumulate(X)
    loss(eager, X).backward()
    with torch.no_grad():
        weight(model).mul_(0.5)
        weight(eager).mul_(0.5)
    sharded.step(X)
    loss(eager, X).backward()
    for parameter in eager.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), eager.parameters(), strict=True))


LEFT: dict[str, Callable[[Net], Any]] = {
    "a penalty": lambda m: m.scale.square().backward(),
    "the model in another's loss": lambda m: loss(m, X).backward(),
    "put there": lambda m: setattr(m.scale, "grad", torch.tensor(1.0)),
}


@pytest.mark.parametrize("way", LEFT)
def test_a_gradient_that_a_step_would_not_add_is_refused_until_it_is_cleared(way: str) -> None:
    model, sharded, eager, optimizer = pair()
    LEFT[way](model)
    before = copy.deepcopy(dict(sharded.state.parameters))
    for call in (sharded.step, sharded.accumulate):
        with pytest.raises(ValueError, match=r"\.grad holds a gradient that a backward of your own left.*zero_grad"):
            call(X)
    assert all(torch.equal(value, before[key]) for key, value in sharded.state.parameters.items())
    model.eval()
    with torch.no_grad():
        sharded(X)  # trains nothing
    model.train()
    model.zero_grad(set_to_none=way != "a penalty")
    assert torch.equal(sharded.step(X), step(eager, optimizer))
    sharded.value_and_grad(X)
    sharded.step(X)  # what value_and_grad left is no gradient of another's


def test_a_copy_is_a_model_of_its_own() -> None:
    model, sharded, _, _ = pair()
    sharded.step(X)
    other = copy.deepcopy(model)
    taken = compile_sharded(
        other, torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.01), loss=loss, policy=EAGER
    )
    assert torch.equal(taken.step(X), sharded.step(X)) and weight(other) is not weight(model)
    third = copy.deepcopy(model)
    with torch.no_grad():
        weight(third).zero_()
        assert torch.equal(torch.compile(third, backend="eager", fullgraph=True)(X), third(X))
        assert not torch.equal(third(X), model(X))


def test_what_is_saved_by_pickle_is_an_ordinary_model() -> None:
    model, sharded, _, _ = pair()
    sharded.step(X)
    for given in (model, model.state_dict()):
        file = io.BytesIO()
        torch.save(given, file)
        file.seek(0)
        found = torch.load(file, weights_only=given is not model)
        loaded = found.state_dict() if given is model else found
        assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
        assert given is not model or all(type(parameter) is nn.Parameter for parameter in found.parameters())


def test_a_model_and_its_shards_are_freed_with_the_last_who_holds_them() -> None:
    model, sharded, _, _ = pair()
    sharded.step(X)
    found = [weakref.ref(one) for one in (model, sharded, *sharded.state.parameters.values())]
    del sharded
    gc.collect()
    assert [one() is None for one in found] == [False, True] + [False] * (len(found) - 2)
    with torch.no_grad():
        model(X)
    del model
    gc.collect()
    assert all(one() is None for one in found)
