"""A model that modes change, trained plainly and sharded, for tests of what is around a call.

Eager is plain PyTorch with the forward inside the mode and ``loss.backward()`` after it, as PyTorch recommends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded

EAGER = Policy(lower="eager")
X, T = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4


@contextmanager
def changed(change: Callable[[Any], object], value: Any, old: Any) -> Iterator[None]:
    """Inside, a setting of the process is another one."""
    change(value)
    try:
        yield
    finally:
        change(old)


class Routed(nn.Module):
    """A part in fp32 whatever is around it, whose products are in backward too, and a buffer that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            x = F.softmax(self.router(x), -1) @ self.router.weight + x
        return self.head(x)


def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), target)


def amp(on: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=on)


def pair(
    make: Callable[[], nn.Module] = Routed, policy: Policy = EAGER, loss: Callable[..., torch.Tensor] = loss_fn
) -> tuple[nn.Module, torch.optim.Optimizer, Sharded]:
    """A plain model with its optimizer, and the same one sharded."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=policy)
    return plain, torch.optim.SGD(plain.parameters(), lr=0.1), sharded


def eager_step(plain: nn.Module, optimizer: torch.optim.Optimizer, around: AbstractContextManager[Any]) -> torch.Tensor:
    with around:
        loss = loss_fn(plain, X, T)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def off(plain: nn.Module, sharded: Sharded) -> float:
    """The largest difference of any weight or buffer."""
    found = sharded.full_state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items())
