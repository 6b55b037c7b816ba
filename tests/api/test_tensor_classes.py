"""Parameters whose class computes in its own way: what forward computes with is of that class, or they are refused.

torchao's weights for BitNet and for int8 and float8 training are such: an ordinary tensor in the place of one computes
something else. Those that FSDP2's two functions are defined for train under `fully_shard`, here on one rank, and on two
in `tests/fsdp/test_fully_shard.py`; others, and all under `compile_sharded`, are refused with nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded, fully_shard
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.fsdp.extended_parameter import check_extended
from tests.toys import EAGER, sgd, squares
from tests.workers.fully_shard_classes import Weight, torchao_losses, torchao_model


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
    """One of the two functions that FSDP2 asks for."""

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


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Function, Inherited, Dispatch, Extension])
def test_a_class_with_mathematics_of_its_own_is_refused(kind: type) -> None:
    x = torch.ones(2, 4)
    for shard in (fully_shard, lambda model: compile_sharded(model, sgd(model), loss=squares, policy=EAGER)):
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


def of_weight() -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(Weight(model.weight.detach()))
    return model


def test_compile_sharded_names_the_face_that_takes_a_class_with_fsdp2s_functions() -> None:
    model = of_weight()
    with pytest.raises(
        ValueError, match=r"weight is a Weight, which has a fsdp_pre_all_gather of its own.*fully_shard"
    ):
        compile_sharded(model, sgd(model), loss=squares, policy=EAGER)


def test_rows_that_ranks_do_not_divide_and_other_signatures_are_refused() -> None:
    model = of_weight()
    with pytest.raises(ValueError, match="weight is a Weight of 4 rows, which 3 ranks do not divide"):
        check_extended(model, "weight", Mesh(torch.device("cpu"), 3), 0)

    class Odd(Weight):
        def fsdp_pre_all_gather(self, mesh: Any, more: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    model.weight = nn.Parameter(Odd(torch.ones(4, 4)))
    with pytest.raises(ValueError, match=r"fsdp_pre_all_gather, of Linear.weight, has 2 parameters; expected"):
        fully_shard(model)


@pytest.mark.parametrize("kind", ["bitnet", "int8", "float8", "nf4"])
@pytest.mark.parametrize("ignored", [False, True])
def test_torchaos_weights_train_as_in_eager_pytorch(kind: str, ignored: bool) -> None:
    pytest.importorskip("torchao")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    eager, model, plain = torchao_model(kind), torchao_model(kind), torchao_model(None)
    left_out = {model[2].weight} if ignored else set()
    fully_shard(model[2], ignored_params=left_out)
    fully_shard(model, ignored_params=left_out, policy=Policy(lower="eager", verify=1))
    expected, found = torchao_losses(eager, 0), torchao_losses(model, 0)
    if kind == "float8" and ignored:  # forward is given no float8 weight, which has another way through the layer
        assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if kind != "nf4":  # there, the plain model has no adapter
        assert not torch.allclose(torchao_losses(plain, 0)[2], expected[2], rtol=1e-5)


def losses(model: nn.Module, changed: Callable[[nn.Module], None] = lambda model: None) -> None:
    for _ in range(2):
        squares(model, torch.ones(2, 4)).backward()
        changed(model)


def test_what_a_program_cannot_be_a_function_of_is_refused() -> None:
    """A class that does not say what it is made of, and one that says something else in a later call."""
    model = nn.Sequential(nn.Linear(4, 4), model_of(Function))
    fully_shard(model, ignored_params={model[1].weight})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"1.weight is a Function, which has a __torch_function__ of its own and no"):
        losses(model)

    class Scaled(Weight):
        def __tensor_flatten__(self) -> Any:
            return ["inside"], getattr(self, "by", 1)

    model = nn.Sequential(nn.Linear(4, 4), of_weight())
    model[1].weight = weight = nn.Parameter(Scaled(torch.ones(4, 4)))
    fully_shard(model, ignored_params={weight})
    with pytest.raises(ValueError, match=r"What 1.weight is made of has changed.*Scaled.* 2, "):
        losses(model, lambda model: setattr(weight, "by", 2))


@pytest.mark.parametrize("kind", [Function, Dispatch])
def test_a_buffer_of_such_a_class_is_refused(kind: type) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(4).as_subclass(kind))
    with pytest.raises(ValueError, match=f"The buffer scale is a {kind.__name__}"):
        compile_sharded(model, sgd(model), loss=squares, policy=EAGER)
    fully_shard(model)
    with pytest.raises(ValueError, match=f"The buffer scale is a {kind.__name__}"):
        model(torch.ones(2, 4))


def test_a_closed_over_tensor_is_what_dynamo_makes_of_it_or_refused() -> None:
    def trained(held: torch.Tensor) -> list[torch.Tensor]:
        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(model(x), held).square().mean()

        model, x = model_of(nn.Parameter), torch.ones(2, 4)
        expected = loss(model, x).detach()
        return [expected, compile_sharded(model, sgd(model), loss=loss, policy=EAGER).step(x)]

    values = torch.arange(16.0).view(4, 4) - 7
    expected, found = trained(values.as_subclass(Function))
    assert torch.equal(expected, found) and not torch.allclose(expected, trained(values)[0])
    for held, text in (
        (values.as_subclass(Dispatch), "cannot be traced whole"),
        (Weight(values), " is a Weight, which has"),
    ):
        with pytest.raises(ValueError, match=text):
            trained(held)


@pytest.mark.parametrize("kind", [Named, nn.Parameter])
def test_a_class_that_adds_none_trains_as_in_eager_pytorch(kind: type) -> None:
    x, eager, model = torch.ones(2, 4), model_of(kind), model_of(kind)
    optimizer = sgd(eager)
    sharded = compile_sharded(model, sgd(model), loss=squares, policy=EAGER)
    for _ in range(3):
        optimizer.zero_grad()
        loss = squares(eager, x)
        loss.backward()
        optimizer.step()
        assert torch.equal(sharded.step(x), loss.detach())


def of_both(model: nn.Module, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fully_shard(model)
    with pytest.raises(ValueError, match=text):
        compile_sharded(model, sgd(model), loss=squares, policy=EAGER)


def test_another_dtype_for_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    model[0].weight.grad_dtype = torch.float32
    of_both(model, r"weight is bfloat16 and has grad_dtype float32; expected its own dtype")
    model[0].weight.grad_dtype = None
    fully_shard(model)


def test_a_part_that_is_torchscript_is_refused() -> None:
    of_both(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), r"1 is TorchScript \(Linear\), which")
