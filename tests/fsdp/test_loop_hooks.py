"""The hooks of all optimizers that `fully_shard` registers go with its last model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import optimizer as module

from fsdp_compiled import compile_sharded, fully_shard
from fsdp_compiled.runtime.fsdp import local_updates as loop_hooks
from tests.toys import EAGER, mse, net


def count() -> int:
    return len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no other test had called `fully_shard` in this process."""
    for name in ("_living", "_handles", "idle"):
        before: list[Any] = []
        monkeypatch.setattr(loop_hooks, name, before)
    monkeypatch.setattr("fsdp_compiled.runtime.sharded_calls.idle_hooks", loop_hooks.idle)


def test_they_go_with_the_last_model() -> None:
    before = count()
    plain = net()
    sharded = compile_sharded(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loss=mse, policy=EAGER)
    one, two = fully_shard(net()), fully_shard(net())
    assert count() == before + 3
    del one
    gc.collect()
    sharded.step(torch.randn(3, 4), torch.randn(3, 2))
    assert count() == before + 3
    del two
    gc.collect()
    assert count() == before + 3 and loop_hooks.idle  # not from inside garbage collection
    sharded.step(torch.randn(3, 4), torch.randn(3, 2))
    assert count() == before and not loop_hooks.idle


def test_they_come_back_with_the_next() -> None:
    before = count()
    fully_shard(net())
    gc.collect()
    model = fully_shard(net())
    assert count() == before + 3
    loop_hooks.remove_idle()
    assert count() == before + 3
    weight = next(model.parameters())
    weight.grad = torch.zeros_like(weight)
    version = weight._version
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step()
    assert weight._version > version
    del weight, model
    gc.collect()
    loop_hooks.remove_idle()
    assert count() == before
