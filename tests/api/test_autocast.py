"""Autocast around a call: the numbers of eager PyTorch with the forward inside it and backward after it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import LossScale, Policy
from tests.modes import T, X, amp, eager_step, loss_fn, off, pair
from tests.parts import parts


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_autocast_around_a_model_with_a_part_in_fp32(lower: Any) -> None:
    """Inside and outside in turns: two programs, and eager's numbers."""
    with parts() as of:
        plain, optimizer, sharded = pair(policy=Policy(lower=lower))
    wrong, other, _ = pair()
    losses = []
    for step in range(4):
        expected = eager_step(plain, optimizer, amp(step % 2 == 0))
        eager_step(wrong, other, nullcontext())
        with amp(step % 2 == 0):
            losses.append((sharded.step(X, T), expected))
    bound = 0.0 if lower == "eager" else 5e-4  # compiled code rounds to bf16 in other places
    assert all((loss - expected).abs() <= bound for loss, expected in losses)
    assert off(plain, sharded) <= bound
    assert lower == "inductor" or off(wrong, sharded) > 0  # a control: the modes are that far apart, and no farther
    assert sharded.captures == 2
    labels = sorted(compiled.label for compiled in of(sharded).programs.cached)
    assert labels[1] == labels[0] + ", under autocast(cpu, bfloat16)"


def test_backward_is_eagers_after_the_block_not_inside_it() -> None:
    """A control: backward inside autocast multiplies the fp32 part's gradients in bf16."""
    plain, optimizer, sharded = pair()
    inside, other, _ = pair()
    for _ in range(2):
        eager_step(plain, optimizer, amp())
        with amp():
            loss_fn(inside, X, T).backward()
            other.step()
            other.zero_grad()
            sharded.step(X, T)
    assert off(plain, sharded) == 0.0 < off(inside, sharded)


class Written(torch.autograd.Function):
    """A product with a backward of the user's, which sees what is on when backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        return (gradient @ weight.T) * (1 - torch.tanh(x) ** 2), torch.tanh(x).T @ gradient


class Decorated(Written):
    """Its backward runs as its forward did, as `torch.amp.custom_bwd` has it."""

    forward = staticmethod(torch.amp.custom_fwd(Written.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Written.backward, device_type="cpu"))


class Custom(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.first(x).float(), self.second.weight.T)  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [Written, Decorated])
def test_an_autograd_function_of_the_users_under_autocast(function: Any) -> None:
    plain, optimizer, sharded = pair(lambda: Custom(function))
    for _ in range(2):
        expected = eager_step(plain, optimizer, amp())
        with amp():
            assert torch.equal(sharded.step(X, T), expected)
    assert off(plain, sharded) == 0.0


def test_all_calls_are_made_under_the_mode() -> None:
    """Microbatches, gradients alone, the functional form and forward alone."""
    plain, optimizer, sharded = pair()
    for part in (slice(0, 3), slice(3, 6)):
        with amp():
            loss = loss_fn(plain, X[part], T[part])
        (loss / 2).backward()
    with amp():
        sharded.accumulate(X[:3], T[:3])
        sharded.step(X[3:], T[3:])
    optimizer.step()
    optimizer.zero_grad()
    assert off(plain, sharded) <= 1e-7
    with amp():
        loss = loss_fn(plain, X, T)
    loss.backward()
    with amp():
        value, gradients = sharded.value_and_grad(X, T)
    assert torch.equal(value, loss)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad.flatten()), name
    optimizer.zero_grad()
    expected = eager_step(plain, optimizer, amp())
    with amp():
        assert torch.equal(sharded.apply(sharded.state, X, T)[1], expected)
        plain.eval(), sharded.model.eval()
        with torch.no_grad():
            assert (sharded(X) - plain(X)).abs().max() <= 1e-2
    assert off(plain, sharded) <= 1e-7


def test_fp16_with_a_loss_scale() -> None:
    """As a GradScaler with the same scale."""
    plain, optimizer, _ = pair()
    _, _, sharded = pair(policy=Policy(lower="eager", loss_scale=LossScale(init=256.0, interval=2)))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for _ in range(5):
        with amp(dtype=torch.float16):
            loss = loss_fn(plain, X, T)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with amp(dtype=torch.float16):
            assert torch.allclose(sharded.step(X, T), loss, rtol=1e-6, atol=0)
    assert off(plain, sharded) <= 1e-6
    assert float(sharded.loss_scale) == scaler.get_scale() > 256.0


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Softmax(-1), nn.Linear(16, 4))


def test_autocast_with_a_mixed_precision_policy() -> None:
    """Parameters cast by the policy first: autocast finds nothing to cast, but keeps its own list of fp32 operators."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, _, sharded = pair(layers, Policy(lower="eager", precision=policy))
    low = copy.deepcopy(plain).bfloat16()
    with amp():
        loss = loss_fn(low, X.bfloat16(), T)
    loss.backward()
    with amp():
        value, gradients = sharded.value_and_grad(X, T)
    assert value.dtype == loss.dtype and torch.equal(value, loss)
    for name, parameter in low.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad.flatten().float()), name
