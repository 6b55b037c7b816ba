"""An update in half precision rounds after each operator, as eager PyTorch does, under Inductor too: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.lower import partition
from tests.chosen import chosen

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, eps=1e-3),
}


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 256).to(dtype))


def _loss(model: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
    """Its gradient is what it is given, which no fusion rounds otherwise."""
    return (model.weight * gradient).sum()  # type: ignore[operator, no-any-return]


def _off(build: Callable[[Any], optim.Optimizer], dtype: torch.dtype) -> int:
    """In how many elements weights differ from eager PyTorch's after three steps, each of two microbatches."""
    eager, model = Weight(dtype), Weight(dtype)
    optimizer = build(eager.parameters())
    policy = Policy(shard="zero1", kernels=False)
    sharded = compile_sharded(model, build(model.parameters()), loss=_loss, policy=policy)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        rows = [torch.randn(256, generator=draw).to(dtype) for _ in range(2)]
        sharded.accumulate(rows[0])
        sharded.step(rows[1])
        eager.weight.grad = (rows[1] + rows[0]) / 2
        optimizer.step()
    return int((sharded.full_state_dict()["weight"] != eager.weight).sum())


@pytest.mark.parametrize("dtype", chosen([torch.bfloat16, torch.float16], [torch.bfloat16]))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_compiled_step_updates_as_eager_pytorch_does(name: str, dtype: torch.dtype) -> None:
    assert _off(OPTIMIZERS[name], dtype) == 0


def test_a_compiled_update_would_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: Inductor rounds where memory is written."""
    monkeypatch.setattr(partition, "_rounds", lambda run: False)
    assert _off(OPTIMIZERS["nesterov"], torch.bfloat16) > 10


def test_an_update_in_single_precision_is_compiled() -> None:
    model = Weight(torch.float32)
    policy = Policy(shard="zero1", kernels=False)
    sharded = compile_sharded(model, optim.AdamW(model.parameters()), loss=_loss, policy=policy)
    sharded.step(torch.ones(256))
    assert "lerp" not in sharded.lowered
