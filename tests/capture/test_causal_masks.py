"""nn.Transformer with a mask and without ``is_causal``, for which PyTorch reads whether the mask is the causal one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded


class Encoder(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, mask=self.mask)


class Decoder(Encoder):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__(mask)
        self.inner = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, tgt_mask=self.mask)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 3).mean()


CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)
BAND = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(2).bool(), float("-inf"))


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("mask", [CAUSAL, BAND], ids=["causal", "another"])
def test_a_mask_is_used_as_it_is(kind: Any, mask: torch.Tensor) -> None:
    torch.manual_seed(0)
    model, x = kind(mask), torch.randn(2, 4, 8)
    expected = loss_of(model, x)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    control = kind(torch.zeros(4, 4))
    control.load_state_dict({**model.state_dict(), "mask": torch.zeros(4, 4)})
    unmasked = loss_of(control, x).item()
    names = [name for name, _ in model.named_parameters()]
    sharded = compile_sharded(model, loss=loss_of, policy=Policy(lower="eager"))
    found, gradients = sharded.value_and_grad(x)
    torch.testing.assert_close(found, expected)
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(gradients[name].flatten(), gradient.flatten(), atol=1e-6, rtol=1e-4)
    assert abs(unmasked - expected.item()) > 1e-4
