"""A model whose forward is a method of that object alone, as TRL and others put it there."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from tests.toys import net

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def doubled(model: nn.Sequential) -> nn.Sequential:
    before = model.forward

    def forward(self: nn.Sequential, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        return before(x) * 2 if twice else self[2](self[0](x))

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("twice", [False, True])
def test_it_is_what_is_compiled(twice: bool) -> None:
    model, plain = fully_shard(doubled(net())), doubled(net())
    for one in (model, plain):
        one(X, twice=twice).square().sum().backward()
    assert torch.equal(model(X, twice=twice), plain(X, twice=twice))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
    assert not torch.equal(model(X, twice=True), model(X, twice=False))


def test_a_function_that_is_no_method_is_refused() -> None:
    model = net()
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no method of it"):
        fully_shard(model)
