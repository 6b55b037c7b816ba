"""What a user may do with a model after compile_sharded: each thing is done to it and to an eager model, and compared.

For tests of one process, and for workers of several ranks, which have the same model and batch on each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from fsdp_compiled import Sharded
from tests.loops import full

X = torch.arange(12.0).reshape(3, 4) / 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.layers[1].weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x) * self.scale + self.frozen)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


Act = Callable[[Any], Any]


def weight(m: Net) -> Any:
    return m.layers[0].weight


def ema(m: Net) -> list[torch.Tensor]:
    average = [parameter.detach().clone() for parameter in m.parameters()]
    torch._foreach_mul_(average, 0.5)
    torch._foreach_lerp_(average, [parameter.detach() for parameter in m.parameters()], 0.1)
    average[0].lerp_(m.scale.detach(), 0.5)
    return average


def averaged(m: Net) -> Any:
    average = AveragedModel(m)
    average.update_parameters(m)
    with torch.no_grad():
        return average(X), dict(average.module.named_parameters())


def copied(m: Net) -> Any:
    other = copy.deepcopy(m)
    assert weight(other) is not weight(m)
    with torch.no_grad():
        weight(other).zero_()
        return other(X), weight(m).detach(), [p.requires_grad for p in other.parameters()]


READS: dict[str, Act] = {
    "state_dict": lambda m: m.state_dict(),
    "a submodule's state_dict": lambda m: m.layers[0].state_dict(),
    "deepcopy": copied,
    "AveragedModel": averaged,
    "an average": ema,
    "full of a full copy": lambda m: weight(m).detach().clone().double(),
    "nn.Parameter of its values": lambda m: nn.Parameter(weight(m).detach()),
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "the model is called": lambda m: m(X),
    "a submodule is called": lambda m: m.layers[0](X),
    "functional_call": lambda m: torch.func.functional_call(m, {}, (X,)),
    "sum": lambda m: weight(m).sum(),
    "norm": lambda m: weight(m).norm(),
    "norms": lambda m: torch.stack([p.norm() for p in m.parameters()]).norm(),
    "foreach norms": lambda m: torch._foreach_norm([p.detach() for p in m.parameters()]),
    "data": lambda m: weight(m).data,
    "tolist": lambda m: weight(m).tolist(),
    "item": lambda m: m.scale.item(),
    "float": lambda m: float(m.scale),
    "a row": lambda m: weight(m)[1],
    "rows": lambda m: list(weight(m)),
    "rows by number": lambda m: weight(m)[torch.tensor([2, 0])],
    "a transposed view": lambda m: weight(m).T.reshape(-1)[3:9],
    "chunks": lambda m: weight(m).chunk(2, 1)[1],
    "comparison": lambda m: weight(m) > 0.1,
    "torch.equal": lambda m: torch.equal(weight(m), weight(m).detach().clone()),
    "allclose with a plain one": lambda m: torch.allclose(weight(m).detach(), torch.ones(4, 4)),
    "isfinite": lambda m: bool(weight(m).isfinite().all()),
    "arithmetic": lambda m: weight(m) * 2 - weight(m).detach().abs() / weight(m).norm(),
    "with another parameter": lambda m: weight(m).detach() + m.layers[1].bias.detach(),
    "sort": lambda m: weight(m).flatten().sort().values,
    "copy_ from it": lambda m: torch.empty(4, 4).copy_(weight(m).detach()),
    "under autocast": lambda m: autocast(m),
    "a matrix product": lambda m: weight(m).detach() @ weight(m).detach(),
}


def autocast(m: Net) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(X, weight(m).detach())


def seeded(act: Act) -> Act:
    def inside(m: Net) -> Any:
        torch.manual_seed(7)
        act(m)

    return inside


def iadd(m: Net) -> None:
    parameter = weight(m)
    parameter += 1


def elements(m: Net) -> None:
    weight(m)[0] = 0.5
    weight(m)[1, 2] = 0.25
    weight(m).view(-1)[3:7].mul_(2)
    weight(m).T[0].add_(0.1)


WRITES: dict[str, Act] = {
    "mul_": lambda m: weight(m).mul_(0.5),
    "+=": iadd,
    "copy_ of a plain one": lambda m: weight(m).copy_(torch.eye(4)),
    "copy_ of another": lambda m: weight(m).copy_(m.layers[1].weight.T),
    "clamp_": lambda m: [p.clamp_(-0.2, 0.3) for p in m.parameters() if p.dim()],
    "data.clamp_": lambda m: [p.data.clamp_(-0.1, 0.2) for p in m.parameters() if p.dim()],
    "elements": elements,
    "nn.init.ones_": lambda m: nn.init.ones_(m.norm.weight),
    "nn.init of a frozen one": lambda m: nn.init.constant_(m.frozen, 0.5),
    "nn.init.normal_": seeded(lambda m: nn.init.normal_(weight(m))),
    "nn.init.trunc_normal_": seeded(lambda m: nn.init.trunc_normal_(weight(m), std=0.1)),
    "reset_parameters": seeded(lambda m: m.layers[0].reset_parameters()),
    "model.apply": seeded(lambda m: m.apply(lambda one: isinstance(one, nn.Linear) and one.reset_parameters())),
    "noise": seeded(lambda m: weight(m).add_(torch.randn_like(weight(m)), alpha=0.1)),
    "out=": lambda m: torch.add(m.layers[1].weight.detach(), 1, out=weight(m)),
    "a foreach update": lambda m: torch._foreach_mul_(list(m.parameters()), 0.9),
    "a foreach update of two views": lambda m: torch._foreach_add_([weight(m)[0], weight(m)[1]], 1.0),
    "masked_fill_": lambda m: weight(m).masked_fill_(torch.eye(4, dtype=torch.bool), 0.0),
    "an average with a plain one": lambda m: weight(m).lerp_(torch.ones(4, 4), 0.25),
    "zero_ of a number": lambda m: m.scale.fill_(0.75),
    "load_state_dict": lambda m: m.load_state_dict(build()[0].state_dict()),
    "load_state_dict of its own": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}),
    "a submodule's load": lambda m: m.layers[0].load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)}),
    "to the same": lambda m: m.to("cpu").float(),
    "to_local": lambda m: (weight(m).to_local() if hasattr(weight(m), "to_local") else weight(m)).mul_(1.5),
}


def in_anothers_loss(m: Net) -> Any:
    x = X.clone().requires_grad_()
    (m(x).square().mean() + x.sum()).backward()
    return x.grad, gradients(m)


def added_up(m: Net) -> Any:
    for _ in range(2):
        m(X).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    return norm, gradients(m)


def penalty(m: Net) -> Any:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    slope.norm().backward()
    return gradients(m)


def frozen_around(m: Net) -> Any:
    m.requires_grad_(False)
    x = X.clone().requires_grad_()
    m(x).sum().backward()
    held = gradients(m)
    for name, parameter in m.named_parameters():
        parameter.requires_grad = name != "frozen"
    return x.grad, held


def penalized(m: Net) -> Any:
    (1e-3 * sum(p.square().sum() for p in m.parameters() if p.requires_grad)).backward()  # type: ignore[union-attr]
    return gradients(m)


def asked_for(m: Net) -> Any:
    trained = [p for p in m.parameters() if p.requires_grad]
    return torch.autograd.grad(m(X).square().mean(), trained)


def gradients(m: Net) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
    m.zero_grad()
    return found


CALLS: dict[str, Act] = {
    "the model in another's loss": in_anothers_loss,
    "two backwards, clipped": added_up,
    "a penalty on the gradient": penalty,
    "frozen around a call": frozen_around,
    "a penalty on weights": penalized,
    "autograd.grad": asked_for,
}


def plain(value: Any) -> Any:
    """With whole tensors in the place of sharded ones."""
    if isinstance(value, Mapping):
        value = dict(value)
    return pytree.tree_map_only(torch.Tensor, full, value)


def compare(sharded: Sharded, model: Net, eager: Net, optimizer: torch.optim.Optimizer) -> list[str]:
    """Does all of it to both; what differs, in words. ``optimizer``: of the eager one."""
    found: list[str] = []

    def same(name: str, one: Any, other: Any) -> None:
        try:
            torch.testing.assert_close(plain(one), plain(other), rtol=1e-5, atol=1e-6)
        except AssertionError as error:
            found.append(f"{name}: {error}")

    def step(name: str) -> None:
        optimizer.zero_grad()
        expected = loss(eager, X)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        same(f"the step after {name}", sharded.step(X), expected)

    for name, act in READS.items():
        with torch.no_grad():
            same(name, act(model), act(eager))
    step("reading")
    for name, act in WRITES.items():
        with torch.no_grad():
            act(model), act(eager)
        same(name, model.state_dict(), eager.state_dict())
        step(name)
    for name, act in CALLS.items():
        same(name, act(model), act(eager))
        step(name)
    (_, returned), expected = sharded.value_and_grad(X), loss(eager, X)
    expected.backward()
    same("the norm after value_and_grad", *(nn.utils.clip_grad_norm_(m.parameters(), 1e-2) for m in (model, eager)))
    if max((one.abs().max().item() for one in returned.values() if one.numel()), default=0.0) > 1e-2:
        found.append("what value_and_grad returned was not clipped")
    same("value_and_grad", gradients(model), gradients(eager))
    same("the end", model.state_dict(), eager.state_dict())
    if sharded.captures != 2:  # a step and value_and_grad
        found.append(f"{sharded.captures} programs")
    return found
