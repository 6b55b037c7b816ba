"""What a program cannot hold because its numbers are in the data, with cures that give eager PyTorch's results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

from fsdp_compiled import compile_sharded, fully_shard
from tests.toys import EAGER, sgd, squares


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_update_bn_works_on_the_model_of_both_faces_or_says_how() -> None:
    loader = list(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)))
    eager, model, taken = normed(), normed(), normed()
    fully_shard(model)
    sharded = compile_sharded(taken, sgd(taken), loss=squares, policy=EAGER)
    with pytest.raises(ValueError, match=r"update_bn sets it so: call it inside of `with model\.gathered\(\):`"):
        update_bn(loader, model)
    model[1].momentum = 0.1
    with model.gathered():  # type: ignore[operator]
        update_bn(loader, model)
    update_bn(loader, eager)
    with pytest.raises(AttributeError, match=r"no attribute 'modules'. Use sharded\.model\.modules\.$"):
        update_bn(loader, sharded)  # type: ignore[arg-type]
    update_bn(loader, sharded.model)
    for one in (model, taken):
        assert all(map(torch.equal, one.buffers(), eager.buffers()))
        assert not torch.equal(one[1].running_mean, normed()[1].running_mean)
    assert torch.equal(sharded.state.buffers["1.running_mean"], eager[1].running_mean)


def test_a_property_that_fails_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = normed()
    sharded = compile_sharded(model, sgd(model), loss=squares, policy=EAGER)
    monkeypatch.setattr(type(sharded), "captures", property(lambda self: self.plan.gone))
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        _ = sharded.captures


class Aligned(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(4, 6), inside

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        found = self.linear(x).log_softmax(-1)
        return F.ctc_loss(found, *more) if self.inside else found


@pytest.mark.parametrize("numbers", [False, True])
def test_ctc_loss_is_refused_with_its_cure(numbers: bool) -> None:
    lengths = [torch.tensor([8, 7, 8]), torch.tensor([3, 2, 3])]
    given = [tuple(one.tolist()) for one in lengths] if numbers else lengths
    x, more = torch.randn(8, 3, 4), (torch.randint(1, 6, (3, 3)), *given)
    model = Aligned(inside=True)
    for shard in (fully_shard, lambda one: compile_sharded(one, sgd(one), loss=Aligned.__call__, policy=EAGER).step):
        call = shard(copy.deepcopy(model))
        with pytest.raises(ValueError, match="ctc_loss is such: return from forward what it needs"):
            call(x, *more)
    cured, eager = (Aligned(inside=False) for _ in range(2))
    cured.load_state_dict(model.state_dict())
    eager.load_state_dict(model.state_dict())
    fully_shard(cured)
    for one in (cured, eager):
        F.ctc_loss(one(x), *more).backward()
    for one, other in zip(cured.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad)  # type: ignore[union-attr]


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.requires_grad_()
        energy = self.down(self.up(x).tanh()).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def test_an_input_that_forward_differentiates_by_is_made_so_before_the_call() -> None:
    model, eager, found = Forces(), Forces(), []
    fully_shard(model)
    cure = r"call requires_grad_\(\) on the input in the loop, before the model is"
    with pytest.raises(ValueError, match=cure if torch.__version__ >= "2.13" else "cannot be traced whole"):
        model(torch.ones(3, 4))
    for one in (model, eager):
        energy, force = one(torch.ones(3, 4).requires_grad_())
        (energy + force.square().sum()).backward()
        grads = [parameter.grad for parameter in one.parameters()]
        found.append([grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
