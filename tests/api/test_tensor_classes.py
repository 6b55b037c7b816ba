"""Parameters whose class computes in its own way are refused by both faces, and nothing is changed.

torchao's weights for BitNet and for int8 and float8 training are such: an ordinary tensor in the place of one computes
something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import compile_sharded, fully_shard
from tests.toys import EAGER, sgd


class Function(torch.Tensor):
    """A weight of which products read the signs alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                args = args[0], args[1].sign(), *args[2:]
            return func(*args, **(kwargs or {}))


class Inherited(Function):
    pass


class Dispatch(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


class Extension(torch.Tensor):
    """What FSDP2 asks for what travels."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None


class Named(nn.Parameter):
    """A class that adds no mathematics."""


def model_of(kind: type) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight.detach()
    if issubclass(kind, nn.Parameter):
        model.weight = kind(weight)
    else:
        own = weight.as_subclass(kind)
        own.requires_grad_()
        own._is_param = True  # what makes it an nn.Parameter, as PyTorch says it
        model.register_parameter("weight", own)
    assert type(model.weight) is kind
    return model


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Function, Inherited, Dispatch, Extension])
def test_a_class_with_mathematics_of_its_own_is_refused(kind: type) -> None:
    x = torch.ones(2, 4)
    for shard in (fully_shard, lambda model: compile_sharded(model, sgd(model), loss=square, policy=EAGER)):
        model = model_of(kind)
        weight, before = model.weight, model(x).detach().clone()
        with pytest.raises(ValueError, match=f"weight is a {kind.__name__}, which has a .* of its own"):
            shard(model)
        assert model.weight is weight and torch.equal(model(x), before)


def test_the_plain_weight_would_be_another_model() -> None:
    """The control: what is refused is not what an ordinary parameter computes."""
    x, model = torch.ones(2, 4), model_of(Function)
    plain = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        plain.weight.copy_(model.weight.as_subclass(torch.Tensor))
    assert not torch.allclose(model(x), plain(x))


@pytest.mark.parametrize("kind", [Named, nn.Parameter])
def test_a_class_that_adds_none_trains_as_in_eager_pytorch(kind: type) -> None:
    x, eager, model = torch.ones(2, 4), model_of(kind), model_of(kind)
    optimizer = sgd(eager)
    sharded = compile_sharded(model, sgd(model), loss=square, policy=EAGER)
    for _ in range(3):
        optimizer.zero_grad()
        loss = square(eager, x)
        loss.backward()
        optimizer.step()
        assert torch.equal(sharded.step(x), loss.detach())


def of_both(model: nn.Module, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fully_shard(model)
    with pytest.raises(ValueError, match=text):
        compile_sharded(model, sgd(model), loss=square, policy=EAGER)


def test_another_dtype_for_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    model[0].weight.grad_dtype = torch.float32
    of_both(model, r"weight is bfloat16 and has grad_dtype float32; expected its own dtype")
    model[0].weight.grad_dtype = None
    fully_shard(model)


def test_a_part_that_is_torchscript_is_refused() -> None:
    of_both(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), r"1 is TorchScript \(Linear\), which")
