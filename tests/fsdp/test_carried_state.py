"""State that forward replaces, and that backward reads as it was before: gradients of eager PyTorch, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.lower import split_forward_backward
from tests.chosen import chosen

STEPS = 4
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda h: h,
    "view": lambda h: h.view(4, 4).view(2, 8),
    "None": lambda h: h[None][0],
    "t": lambda h: h.t().t(),
    "expand": lambda h: h[None].expand(1, 2, 8)[0],
    "unbind": lambda h: h.unbind(0)[0],
    "chunk": lambda h: torch.cat(h.chunk(2, 1), 1),
    "slice": lambda h: h[:, :8],
    "diagonal": lambda h: h + h.diagonal()[0],
    "as_strided": lambda h: h.as_strided((2, 8), (8, 1)),
    "complex": lambda h: torch.view_as_real(torch.view_as_complex(h.view(2, 4, 2))).view(2, 8),
    "detach": lambda h: h.detach(),
    "split": lambda h: h.split(1)[1],
    "unflatten": lambda h: h.unflatten(1, (2, 4)).flatten(1),
    "two": lambda h: h[0] * h[1:],
}
KEPT = ("attribute", "buffer")


class Carried(nn.Module):
    def __init__(self, view: str, kept: str) -> None:
        super().__init__()
        self.linear, self.view = nn.Linear(8, 8), VIEWS[view]
        if kept == "buffer":
            self.register_buffer("h", torch.full((2, 8), 0.5))
        else:
            self.h = torch.full((2, 8), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.view(self.h)
        y = torch.tanh(self.linear(x * before) + before)
        self.h = y.detach()
        return (y * before).square().sum()


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer: Any = getattr(nn, kind)(8, 8, batch_first=True)
        self.h, self.c = torch.full((1, 2, 8), 0.3), torch.full((1, 2, 8), 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(2, 3, 8)
        if isinstance(self.layer, nn.LSTM):
            y, (h, c) = self.layer(x, (self.h, self.c))
            self.c = c.detach()
        else:
            y, h = self.layer(x, self.h)
        self.h = h.detach()
        return y.square().sum()


def difference(model: nn.Module) -> float:
    """Between eager PyTorch's gradients and losses and ours, at most, over some steps."""
    eager, found = copy.deepcopy(model), 0.0
    fully_shard(model)
    for step in range(STEPS):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        ours, expected = model(x), eager(x)
        ours.backward()
        expected.backward()
        found = max(found, abs(ours.item() - expected.item()))
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            found = max(found, float((one.grad.full_tensor() - other.grad).abs().max()))  # type: ignore[union-attr]
        model.zero_grad()
        eager.zero_grad()
    return found


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("view", chosen(VIEWS, ("itself", "view", "unbind", "slice", "as_strided", "two")))
def test_backward_reads_what_was_there_before(view: str, kept: str) -> None:
    torch.manual_seed(0)
    assert difference(Carried(view, kept)) == 0


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_that_go_on_where_the_last_batch_ended(kind: str) -> None:
    torch.manual_seed(0)
    assert difference(Recurrent(kind)) <= 1e-6


def test_control_a_view_of_what_is_written_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_forward_backward, "base_of", lambda node: node)
    torch.manual_seed(0)
    assert difference(Carried("view", "buffer")) > 0.1


class Unbroken(nn.Module):
    """Leaves its state with the graph that it was computed by."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if kept == "buffer":
            self.register_buffer("h", torch.full((8,), 0.5))
        else:
            self.h = torch.full((8,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) + self.h)
        self.h = y.mean(0)
        return y.square().sum()


@pytest.mark.parametrize("kept", KEPT)
def test_a_graph_through_two_forwards_is_refused_and_state_that_a_loop_detaches_is_right(kept: str) -> None:
    torch.manual_seed(0)
    plain = Unbroken(kept)
    model = fully_shard(copy.deepcopy(plain))
    losses: list[list[float]] = [[], []]
    for net, found in zip((plain, model), losses, strict=True):
        for step in range(STEPS):
            loss = net(torch.full((2, 8), float(step)))
            loss.backward()
            net.h = net.h.detach()
            found.append(loss.item())
        with torch.no_grad():
            found += [net(torch.ones(2, 8)).item(), net(torch.ones(2, 8)).item()]
        found.append(net(torch.ones(2, 8)).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(RuntimeError, match=r"reads .*h, which its forward before this one left there with its graph"):
        model(torch.ones(2, 8))
    model.h = model.h.detach()
    model(torch.ones(2, 8)).backward()
