"""Loops over models of other kinds: parts frozen, adapters, structures, two models, nested units; of fully_shard.py."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests.loops import GPT, WIDTH, batch, gradients, loss_of, squares, train, weights


def frozen(api: Any) -> Any:
    """The embedding and one block are frozen, before the model is sharded; another part is frozen and thawed later."""
    torch.manual_seed(0)
    model = GPT()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    for layer in model.layers:
        api.fully_shard(layer)
    api.fully_shard(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    found = train(model, optimizer, 2)
    model.layers[1].up.requires_grad_(False)
    loss_of(model, 7).backward()
    return [*found, *gradients(model)]


class Adapter(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.b(self.a(x))


def adapters(api: Any) -> Any:
    torch.manual_seed(0)
    model = GPT().requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Adapter(layer.up), Adapter(layer.down)  # type: ignore[assignment]
        api.fully_shard(layer)
    api.fully_shard(model)
    return train(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2))


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    length: int
    loss: torch.Tensor | None = None


class Structured(nn.Module):
    """Gives a structure back, takes one, and has a part that is not used and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, given: dict[str, torch.Tensor], scale: float = 1.0) -> Any:
        x = self.norm(self.one(given["x"]) * scale)
        y = self.two(x)
        return {"y": y, "pair": (x, x.argmax(-1)), "scale": scale, "same": given["x"]}


def structured(api: Any) -> Any:
    torch.manual_seed(0)
    model = api.fully_shard(Structured())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(3):
        x, y = batch(step, "rows")
        x.requires_grad_()
        out = model({"x": x}, scale=2.0)
        (F.mse_loss(out["y"], y) + out["pair"][0].sum() * 0.1).backward()
        found += [out["pair"][1], out["scale"], x.grad, *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *weights(model)]


def adversarial(api: Any) -> Any:
    """Two models that are trained against each other, one through the other."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    judge = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
    for model in (maker, judge):
        api.fully_shard(model)
    first = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.9))
    second = torch.optim.Adam(judge.parameters(), lr=1e-2, betas=(0.5, 0.9))
    found: list[Any] = []
    for step in range(3):
        noise, real = batch(step, "rows")
        second.zero_grad()
        made = maker(noise)
        one = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        one.backward()
        second.step()
        first.zero_grad()
        two = F.softplus(-judge(made)).mean()
        two.backward()
        first.step()
        found += [one.detach(), two.detach(), *gradients(judge)]
    return [*found, *weights(maker), *weights(judge)]


def nested(api: Any) -> Any:
    """Units inside of units, one parameter shared by two of them, and the root kept gathered."""
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        api.fully_shard(layer.up)
        api.fully_shard(layer, reshard_after_forward=False)
    api.fully_shard(model, reshard_after_forward=True)
    model.layers[0].set_reshard_after_forward(True)  # type: ignore[operator]
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def uneven(api: Any) -> Any:
    """Fewer rows than ranks, and numbers of rows that the ranks do not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0), nn.Linear(3, 7))
    api.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shapes = [tuple(one.to_local().shape) for one in model.parameters()]
    placements = [str(one.placements) for one in model.parameters()]
    kept = copy.deepcopy(model.state_dict())  # of a rank without rows, too
    found = train(model, optimizer, loss=squares)
    model.load_state_dict(kept)
    return [shapes, placements, *found, *weights(model)]


def meta(api: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH))
    api.fully_shard(model[0])
    api.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model:
        module.reset_parameters()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, optimizer, 2, squares)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.into(x))

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.out(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def methods(api: Any) -> Any:
    """Other methods than forward, the modules of a list, and blocks alone, under a root that is not sharded."""
    torch.manual_seed(0)
    model = api.fully_shard(Coder())
    api.register_fsdp_forward_method(model, "encode")
    api.register_fsdp_forward_method(model, "decode")

    def loss(model: Any, step: int) -> torch.Tensor:
        x, y = batch(step, "rows")
        return F.mse_loss(model.decode(model.encode(x)), y) + model(x).square().mean()

    found = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, loss)
    torch.manual_seed(0)
    plain = GPT()
    for layer in plain.layers:
        api.fully_shard(layer)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    return [*found, *train(plain, optimizer, 2)]


def held_by_methods(api: Any) -> Any:
    """One method runs without synchronisation, another with it; what is held back is a parameter's."""
    torch.manual_seed(0)
    model = api.fully_shard(Coder())
    api.register_fsdp_forward_method(model, "encode")
    x, y = batch(0, "rows")
    model.set_requires_gradient_sync(False)
    model.encode(x).square().sum().backward()
    found = gradients(model)
    model.set_requires_gradient_sync(True)
    F.mse_loss(model(x), y).backward()
    return [*found, *gradients(model)]


def ignored(api: Any) -> Any:
    torch.manual_seed(0)
    model = GPT()
    api.fully_shard(model, ignored_params={model.head.weight})
    found = train(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), 2)
    return [isinstance(model.head.weight, DTensor), *found]


CASES = (frozen, adapters, structured, adversarial, nested, uneven, meta, methods, held_by_methods, ignored)
