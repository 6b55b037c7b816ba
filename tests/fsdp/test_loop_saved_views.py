"""What a forward keeps for backward is what views are of, and backward makes the views again; beside eager PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_compiled import Policy, fully_shard


class Gated(nn.Module):
    """Backward reads two halves of one product; the control reads sums of them, which are no views."""

    def __init__(self, control: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.control = nn.Linear(4, 6), nn.Linear(3, 2), control

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.up(x).chunk(2, -1)
        if self.control:
            left, right = left + 1, right + 1
        return self.down(left.transpose(0, 1).transpose(0, 1) * right)


def trained(control: bool = False) -> tuple[list[torch.Size], int]:
    """What forward kept, and how many transposes backward runs; its gradients are those of eager PyTorch."""
    torch.manual_seed(0)
    plain, x = Gated(control), torch.randn(5, 4)
    model = fully_shard(copy.deepcopy(plain), policy=Policy(lower="eager"))
    plain(x).square().sum().backward()
    model(x).square().sum().backward()
    model.zero_grad()
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        out = model(x)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        out.square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad.full_tensor())
    return kept, sum(event.count for event in seen.key_averages() if event.key == "aten::t")


def test_what_views_are_of_is_kept() -> None:
    kept, _ = trained()
    assert torch.Size([5, 6]) in kept
    others, _ = trained(control=True)
    assert torch.Size([5, 6]) not in others
    assert kept.count(torch.Size([5, 3])) == others.count(torch.Size([5, 3])) - 2


def test_a_weights_gradient_is_not_transposed_back_and_forth() -> None:
    """One transpose a product: of what comes from behind; and of the weight that the second one's input needs."""
    _, transposes = trained()
    assert transposes <= 4, transposes
