"""nn.LSTM and its kin: what PyTorch's own modules note for themselves is nobody's loss, and they train as eager."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], kept: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(10, 1)
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.cell(x)
        if self.kept:
            self.cell._last = h  # type: ignore[assignment]
        return self.head(h).square().mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_captured_without_a_warning_and_train_as_eager(
    kind: type[nn.RNNBase], caplog: pytest.LogCaptureFixture
) -> None:
    model = Recurrent(kind)
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=Policy(lower="eager"))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        for step in range(3):
            x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            expected = plain(x)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(sharded.step(x), expected.detach())
    assert not caplog.records and sharded.captures == 1
    for name, value in sharded.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_what_the_user_keeps_on_such_a_module_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The control."""
    model = Recurrent(nn.GRU, kept=True)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=Policy(lower="eager"))
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        sharded.step(torch.randn(2, 3, 4))
    assert "forward keeps tensors in cell._last" in caplog.text and "_flat" not in caplog.text
