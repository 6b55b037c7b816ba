"""The norm that clips is `torch.nn.utils.clip_grad_norm_`'s: every element of the mean gradient once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests import models
from tests.models import Block, Recipe
from tests.recipes import trained

MAXIMUM = 0.05


@pytest.mark.parametrize(
    ("shard", "mesh"), [("zero3", (2, 2)), ("zero2", (3, 1)), ("zero1", (2, 2)), ("ddp", (2, 1))], ids=str
)
def test_the_norm_is_exact_with_frozen_and_tied_parameters_and_replicas(shard: str, mesh: tuple[int, int]) -> None:
    what = Recipe(
        (Block("tied inside"), Block("linear", freeze="all"), Block("linear", freeze="first"), Block("read twice")),
        policy=Policy(shard=shard, clip=MAXIMUM, lower="eager"),
        tied_head=True,
        groups="two",
        shard=mesh[0],
        replicate=mesh[1],
        units="pattern",
    )
    simulation = trained(what, steps=1)
    model, optimizer = models.build(what)
    rows = models.batches(what, 1)
    for batch in rows[0]:
        (models.loss(model, *batch) / len(rows[0])).backward()
    owned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(owned) < len(list(model.parameters()))
    one_rank = torch.autograd.grad(models.loss(model, *rows[0][0]), owned)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAXIMUM)
    assert norm > MAXIMUM
    optimizer.step()
    assert simulation.norms[0].item() == pytest.approx(norm.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert (simulation.parameters[name] - parameter).norm() <= 1e-6 * parameter.norm(), name
    # What a norm over tied parameters twice, over frozen ones or of one rank's gradient would be is another number.
    local = torch.stack([gradient.norm() for gradient in one_rank]).norm()
    tied = model.embedding.weight.grad
    assert tied is not None
    for wrong in (local, (norm**2 + (tied.norm() * norm / MAXIMUM) ** 2).sqrt()):
        assert wrong.item() != pytest.approx(norm.item(), rel=1e-3)


def test_what_no_optimizer_holds_is_not_in_the_norm_which_is_said(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model[2].parameters(), 0.5)
    policy = Policy(lower="eager", clip=MAXIMUM)
    sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=policy)
    assert "The optimizer does not hold 0.weight, 0.bias: their gradients are not in the norm" in caplog.text
    without = compile_sharded(copy.deepcopy(plain), loss=lambda model, x: model(x).square().mean(), policy=policy)
    assert len(caplog.records) == 1 and without.value_and_grad(x)  # of an optimizer that there is
    sharded.step(x)
    plain(x).square().mean().backward()
    every = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm()
    held = torch.nn.utils.clip_grad_norm_(plain[2].parameters(), MAXIMUM)
    assert sharded.grad_norm.item() == pytest.approx(held.item(), rel=1e-6) != pytest.approx(every.item(), rel=1e-3)
