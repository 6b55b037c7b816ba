"""What `compile_sharded` and the calls of a `Sharded` refuse: each says what is wrong, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from fsdp_compiled import CaptureError, Policy, compile_sharded
from tests.toys import EAGER, Block, Net, batches, build, mse, same_weights, sgd


def _unchanged(model: nn.Module, before: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    assert same_weights(dict(model.state_dict()), before)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} <= {id(p) for p in model.parameters()}
    model(batches(1)[0][0])


REFUSED: dict[str, tuple[Callable[[Net], dict[str, Any]], str]] = {
    "a parameter twice": (
        lambda model: {"optimizer": torch.optim.SGD([*model.parameters(), next(model.parameters())], 0.1)},
        "twice, in groups 0 and 0",
    ),
    "optimizer": (lambda model: {"optimizer": sgd(build())}, "not the model's: group 0, position 0"),
    "not an optimizer": (lambda model: {"optimizer": 0.1}, "optimizer is a float"),
    "loss": (lambda model: {"loss": 3}, "loss is a int; expected a function"),
    "no such unit": (lambda model: {"units": "layers.*"}, r"'layers\.\*' matches no submodule.*blocks"),
    "no such class": (lambda model: {"units": nn.Conv2d}, "Conv2d matches no submodule"),
    "overlap": (lambda model: {"units": ["blocks.*", Block]}, "units overlap: 'blocks.0'"),
    "not a unit": (lambda model: {"units": [3]}, "3 is neither a module class nor a name pattern"),
    "empty choice": (lambda model: {"units": lambda name, module: False}, "matches no submodule"),
    "policy": (lambda model: {"policy": "zero3"}, "policy is a str; expected fsdp_compiled.Policy"),
    "mesh": (lambda model: {"mesh": 2}, "mesh is a int; expected a DeviceMesh"),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_and_nothing_is_changed(case: str) -> None:
    arguments, message = REFUSED[case]
    model = build()
    optimizer = sgd(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        compile_sharded(model, **({"optimizer": optimizer, "loss": mse} | arguments(model)))
    _unchanged(model, before, optimizer)
    compile_sharded(model, optimizer, loss=mse, policy=EAGER)


@pytest.mark.parametrize("value", [3, None, nn.Linear, [nn.Linear(2, 2)]], ids=repr)
def test_what_is_not_a_module_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module"):
        compile_sharded(value)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="has no parameters"):
        compile_sharded(nn.ReLU())


def test_an_optimizer_that_is_not_elementwise_is_refused_before_anything_is_changed() -> None:
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="LBFGS is not supported"):
        compile_sharded(model, optimizer, loss=mse)
    _unchanged(model, before, optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": "zero4"}, "Policy.shard is 'zero4'; expected one of 'zero3'"),
        ({"lower": "tvm"}, "Policy.lower is 'tvm'"),
        ({"clip": -1.0}, "Policy.clip is -1.0; expected a positive number or None"),
        ({"clip": True}, "Policy.clip is True"),
        ({"precision": torch.bfloat16}, "expected torch.distributed.fsdp.MixedPrecisionPolicy"),
        ({"precision": MixedPrecisionPolicy(param_dtype=torch.int8)}, "param_dtype is torch.int8"),
    ],
)
def test_unknown_policy_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**options)


def _saves(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    torch.save(output, "never.pt")
    return F.mse_loss(output, y)


def _reads(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    return loss * 2 if loss.item() > 1 else loss


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "not scalar": (lambda model, x, y: model(x), r"loss has shape \[5, 2\]; expected a scalar"),
    "not floating": (lambda model, x, y: model(x).sum().long(), "loss has dtype torch.int64"),
    "detached": (lambda model, x, y: mse(model, x, y).detach(), "does not depend on any parameter"),
    "no tensor": (lambda model, x, y: 3.0, "returned a float in the place of a scalar"),
    "saving": (_saves, r'test_api_refused\.py", line \d+, in _saves(.|\n)*Cure'),
    "reading": (_reads, r'test_api_refused\.py", line \d+, in _reads(.|\n)*Cure'),
    "three results": (
        lambda model, x, y: (mse(model, x, y), model(x).mean(), x),
        "returned a tuple in the place of a scalar",
    ),
    "a list": (lambda model, x, y: [mse(model, x, y), x], "returned a list in the place of a scalar"),
    "of a wrong decomposition": (  # trained with another loss before, and without a word
        lambda model, x, y: F.multilabel_margin_loss(model(x), torch.tensor([[1, -1]]).expand(5, 2)),
        r"multilabel_margin_loss takes what comes after(.|\n)*test_api_refused\.py(.|\n)*Cure",
    ),
    "wrong shapes": (lambda model, x, y: mse(model, x.T, y), "failed while it was traced"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_cannot_be_trained_on_is_refused_and_nothing_is_changed(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    loss, message = LOSSES[case]
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=loss, policy=EAGER)
    before = pytree.tree_map(torch.clone, sharded.state)
    with pytest.raises(CaptureError, match=message):
        sharded.step(*batches(1)[0])
    assert all(map(torch.equal, pytree.tree_leaves(before), pytree.tree_leaves(sharded.state)))
    assert sharded.captures == 0


def test_a_batch_on_another_device_is_refused() -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    x, y = batches(1)[0]
    with pytest.raises(ValueError, match=r"batch\[0\] is on meta, but the model's shards are on cpu"):
        sharded.step(x.to("meta"), y.to("meta"))
    with pytest.raises(ValueError, match=r"batch\[1\] is on meta"):
        sharded.step(x, y.to("meta"))


def test_an_optimizer_is_not_used_after_it_was_taken_over_and_the_model_is() -> None:
    model = build()
    optimizer = sgd(model)
    sharded = compile_sharded(model, optimizer, loss=mse, policy=EAGER)
    x, y = batches(1)[0]
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(x), sharded(x))
        with pytest.raises(RuntimeError, match="optimizer was taken over"):
            optimizer.step()
        for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(RuntimeError, match=r"its state lives in sharded\.state\.optimizer"):
                call()
        model.load_state_dict(sharded.full_state_dict())
        with pytest.raises(ValueError, match="taken over by compile_sharded before"):
            compile_sharded(model)
        sharded.step(x, y)
    with pytest.raises(ValueError, match="taken over"):
        compile_sharded(nn.Sequential(model))


def test_step_without_an_optimizer_says_the_cure() -> None:
    sharded = compile_sharded(build(), loss=mse, policy=EAGER)
    with pytest.raises(RuntimeError, match="Pass it: compile_sharded"):
        sharded.step(*batches(1)[0])
    with pytest.raises(RuntimeError, match="No step was taken"):
        _ = sharded.grad_norm
    with pytest.raises(RuntimeError, match="Nothing was compiled"):
        _ = sharded.program


def test_a_sharded_is_not_copied() -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(compile_sharded(build(), loss=mse, policy=EAGER))


def test_a_param_group_added_afterwards_is_refused() -> None:
    model = build()
    optimizer = sgd(model)
    sharded = compile_sharded(model, optimizer, loss=mse, policy=EAGER)
    more = {"params": [nn.Parameter(torch.ones(2))]}
    with pytest.raises(RuntimeError, match="Add parameters and groups before compile_sharded"):
        optimizer.add_param_group(more)
    optimizer.param_groups.append({**optimizer.param_groups[0], **more})
    with pytest.raises(ValueError, match="param group was added or removed after compile_sharded"):
        sharded.step(*batches(1)[0])


def test_requires_grad_changed_afterwards_is_refused() -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of head\.weight was changed after compile_sharded"):
        sharded.step(*batches(1)[0])
    model.head.requires_grad_(True)
    sharded.step(*batches(1)[0])


def test_a_meta_module_that_nobody_can_fill_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bare())
    with pytest.raises(ValueError, match=r"1 \(Bare\) is on the meta device.*scale.*Pass init="):
        compile_sharded(model)


def test_a_parameter_written_by_forward_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return x @ self.weight

    sharded = compile_sharded(Writes(), loss=mse, policy=EAGER)
    with pytest.raises(CaptureError, match=r"writes parameter .*weight in place|Forward writes"):
        sharded.value_and_grad(*batches(1)[0])


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    outside = nn.Parameter(torch.ones(2))
    sharded = compile_sharded(build(), loss=lambda model, x, y: mse(model, x, y * outside), policy=EAGER)
    with pytest.raises(CaptureError, match="not a parameter of the model: its gradient would be lost"):
        sharded.value_and_grad(*batches(1)[0])
