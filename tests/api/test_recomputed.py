"""What the docs say of checkpointed regions and of the encoder's fast path, beside eager PyTorch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import Policy, compile_sharded, fully_shard

FACES = ("fully_shard", "compile_sharded")
EAGER = Policy(lower="eager")


class Recomputed(nn.Module):
    """Its inner modules run again in backward. ``preserve``: with the same random numbers."""

    def __init__(self, inner: nn.Module, preserve: bool = True) -> None:
        super().__init__()
        self.inner, self.preserve = inner, preserve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return found.square().mean()


def trained(model: nn.Module, face: str, x: torch.Tensor) -> list[Any]:
    """The losses of two steps."""
    torch.manual_seed(1)
    if face == "fully_shard":
        fully_shard(model, policy=EAGER)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if face == "compile_sharded":
        sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x), policy=EAGER)
        return [float(sharded.step(x)) for _ in range(2)]
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("face", FACES)
def test_a_mask_of_dropout_is_drawn_once_whatever_is_asked(face: str) -> None:
    """Eager PyTorch computes gradients with another mask than the loss had, where it keeps no random numbers."""
    torch.manual_seed(0)
    inner, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(4, 8)
    same, other, mine = Recomputed(inner), Recomputed(deepcopy(inner), False), Recomputed(deepcopy(inner), False)
    found = {"same": trained(same, "", x), "other": trained(other, "", x), "mine": trained(mine, face, x)}
    assert found["mine"] == pytest.approx(found["same"], rel=1e-6)
    assert found["other"][0] == found["same"][0] and abs(found["other"][1] - found["same"][1]) > 1e-4


@pytest.mark.parametrize("face", FACES)
def test_a_norm_s_statistics_move_once_a_step(face: str) -> None:
    """Eager PyTorch moves them a second time when backward computes again."""
    torch.manual_seed(0)
    inner, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
    eager, mine = Recomputed(inner), Recomputed(deepcopy(inner))
    assert trained(mine, face, x) == pytest.approx(trained(eager, "", x), rel=1e-6)
    counts = [int(one.inner[1].num_batches_tracked) for one in (eager, mine)]  # type: ignore[index]
    assert counts == [4, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of the fast path
@pytest.mark.parametrize("face", FACES)
def test_an_encoder_does_not_zero_padded_places_in_evaluation(face: str) -> None:
    """Without its fast path, which eager PyTorch takes, padded places are what they are in training."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padded = torch.randn(2, 4, 8), torch.tensor([[False, False, True, True], [False] * 4])
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=padded)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            slow = model(x, src_key_padding_mask=padded)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    if face == "fully_shard":
        called = fully_shard(model, policy=EAGER)
    else:
        called = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), policy=EAGER)
    with torch.no_grad():
        found = called(x, src_key_padding_mask=padded)  # type: ignore[operator]
    assert torch.allclose(found, slow, atol=1e-6) and torch.allclose(found[~padded], fast[~padded], atol=1e-5)
    assert float((fast[padded]).abs().max()) == 0.0 < 0.1 < float(found[padded].abs().max())
