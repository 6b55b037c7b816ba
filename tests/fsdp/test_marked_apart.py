"""Modules that share a parameter, each given to `fully_shard` by itself: the tie stays, and eager PyTorch's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsdp_compiled import fully_shard


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.mid(self.embed(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())


def losses(model: nn.Module) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(4):
        loss = model(torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def built(order: str) -> tuple[Tied, Tied]:
    """A plain model, and one whose parts were given to `fully_shard` in this order; "." is the model."""
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    for part in order.split():
        fully_shard(model if part == "." else getattr(model, part))
    return plain, model


@pytest.mark.parametrize("order", ["head .", "embed .", "embed head .", "head embed mid .", "head embed mid"])
def test_the_tie_stays(order: str) -> None:
    plain, model = built(order)
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert losses(plain) == (losses(model) if "." in order else losses(fully_shard(model)))
    assert list(model.state_dict()) == list(plain.state_dict())


def test_gathered_and_freed_it_is_one_parameter() -> None:
    _, model = built("head embed .")
    model.head.unshard()
    assert model.head.weight is model.embed.weight and model.head.weight.shape == (11, 8)
    model.head.reshard()
    assert model.head.weight is model.embed.weight


def test_a_module_that_no_call_holds_is_refused() -> None:
    _, model = built("head")
    with pytest.raises(ValueError, match=r"Embedding.weight is tied to a parameter .* holds both"):
        model.head(torch.ones(2, 8))
    fully_shard(model)
    assert torch.isfinite(torch.tensor(losses(model))).all()


def test_control_the_parameter_that_took_its_place_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_compiled.runtime.fsdp.fully_shard.ENTRY", "another")
    plain, model = built("head .")
    assert model.head.weight is not model.embed.weight
    assert losses(plain) != losses(model)
