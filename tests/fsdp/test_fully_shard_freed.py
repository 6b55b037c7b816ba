"""What a loop with `fully_shard` holds in backward is freed as in eager PyTorch."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled import Policy, fully_shard
from tests.allocator import record


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gradients of results come in a tuple")
@pytest.mark.parametrize("keeps", [False, True])
def test_the_gradient_of_what_is_returned_is_freed_when_it_was_read(keeps: bool) -> None:
    """Before what comes after it in backward is computed. The control holds it, by a hook."""
    alive: list[bool] = []
    seen: list[Any] = []

    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), policy=Policy(lower="eager"))
    x = torch.randn(64, 64)
    model(x).sum().backward()
    result = model(x)
    result.register_hook(lambda gradient: seen.append(gradient if keeps else weakref.ref(gradient)))

    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if seen:
                alive.append(keeps or seen[0]() is not None)
            return func(*args, **(kwargs or {}))

    loss = result.square().sum()
    with Last():
        loss.backward()
    assert alive[0] and alive[-1] == keeps


@pytest.mark.parametrize("retain", [False, True])
def test_backward_frees_activations_as_it_goes(retain: bool) -> None:
    """As eager PyTorch does: its peak is where backward begins. The control retains the graph, and so all of it."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(128, 128, bias=False), nn.Tanh())))
    model, x = copy.deepcopy(plain), torch.randn(128, 128)
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model, policy=Policy(lower="eager"))
    peaks = []
    for one in (plain, model):
        for _ in range(2):  # the first compiles, and each leaves gradients to add to
            one(x).sum().backward()
        one.zero_grad()
        with record() as recording:
            one(x).sum().backward(retain_graph=retain and one is model)
        peaks.append(recording.peak)
    assert (peaks[1] < peaks[0] + 0.3 * 8 * x.nbytes) == (not retain), [peak / x.nbytes for peak in peaks]
