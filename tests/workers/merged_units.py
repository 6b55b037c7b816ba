"""Marked modules that are gathered together, on two ranks: what is sent, and what a loop sees of each of them.

torchrun --nproc-per-node 2 merged_units.py RESULT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as theirs
from torch.profiler import profile

from bench.observe import NOT_DATA
from fsdp_compiled import Policy, fully_shard
from fsdp_compiled.runtime.fsdp.merged_units import rows
from fsdp_compiled.runtime.fsdp.module_state import states_in
from tests.launch import answer, of_all, told

WIDTH, LAYERS = 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, torch.ones(3, WIDTH))


def deep(shard: Callable[..., Any] = fully_shard, layers: int = LAYERS, **root: Any) -> Any:
    torch.manual_seed(0)
    return shard_all(Deep(layers), shard, **root)


def shard_all(model: Deep, shard: Callable[..., Any], **root: Any) -> Any:
    for layer in model.layers:
        shard(layer)
    return shard(model, **root)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randint(16, (2, 5), generator=generator)).square().mean()


def train(model: nn.Module, steps: int = 2, rate: float = 0.1) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.full_tensor().detach().clone() for one in model.parameters()]


def units(model: Any, method: str = "forward") -> list[str]:
    return [unit.name for unit in model._fsdp_compiled.calls[method].plan.units]


def sent(model: nn.Module) -> int:
    """Collectives of a step."""
    train(model, 1)
    with profile() as profiled:
        loss_of(model).backward()
    names = [event.name for event in profiled.events()]
    return sum(name.startswith("c10d::") and name not in NOT_DATA for name in names)


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


PAIR = 2 * 4 * (WIDTH * WIDTH + 3 * WIDTH) / 2**20  # MiB of two blocks
AUTO = Policy(lower="eager")
EAGER = Policy(lower="eager", bucket_mb=PAIR)
APART = Policy(lower="eager", bucket_mb=0)


def groups_of(model: nn.Module) -> list[Any]:
    return [state.group for state in states_in(model)]


def collectives() -> Any:
    merged, apart, alike = deep(layers=24, policy=AUTO), deep(policy=APART), deep(theirs)
    counts = [sent(merged), sent(apart), sent(alike)]
    compiled = [len(run) for run, _ in rows(groups_of(deep(layers=24, policy=Policy())))]
    reason = str(merged._fsdp_compiled.calls["forward"].plan).splitlines()[-1]
    return counts, units(merged), units(apart), compiled, reason


def numbers() -> Any:
    """The same weights, whether merged or not, and FSDP2's; another rate is told apart."""
    expected = train(deep(theirs))
    return [same(train(deep(policy=policy), rate=rate), expected)
            for policy, rate in ((EAGER, 0.1), (APART, 0.1), (EAGER, 0.1000001))]  # fmt: skip


def local_tensors() -> Any:
    """A rank's own part that was taken before the first call is the parameter's after it."""
    model = deep(policy=EAGER)
    held = [one.to_local() for one in model.parameters()]
    train(model)
    return all(one.data_ptr() == two.to_local().data_ptr() for one, two in zip(held, model.parameters(), strict=True))


def writes() -> Any:
    """To modules whose parameters backward does not read, and to a neighbour whose parameters it reads."""
    model = Deep(LAYERS)
    model.layers[2] = Shift()
    model = shard_all(model, fully_shard, policy=EAGER)
    train(model, 1)
    found: list[Any] = [units(model)]
    for written in (model.embed.weight, model.layers[2].bias, model.layers[3].linear.weight):
        loss = loss_of(model)
        with torch.no_grad():
            written.add_(1.0)
        found.append(told(loss.backward))
    return found


def treated_apart() -> Any:
    """Modules that are treated in other ways after they were marked."""
    model = deep(policy=EAGER)
    train(model, 1)
    model.layers[3].set_reshard_after_forward(False)
    train(model, 1)
    kept = units(model)
    model.layers[3].set_reshard_after_forward(True)
    model.layers[5].requires_grad_(False)
    loss_of(model).backward()
    return kept, units(model), [one.grad is None for one in model.layers[5].parameters()]


def alone() -> Any:
    """A module inside that is called by itself gathers what is its own; what it holds back is reduced with the rest."""
    found = []
    for policy in (EAGER, APART):
        model = deep(policy=policy)
        train(model, 1)
        model.set_requires_gradient_sync(False)
        model.layers[4](torch.full((2, WIDTH), dist.get_rank() + 0.5)).square().sum().backward()
        names = units(model.layers[4])
        loss_of(model, 1).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, 2).backward()
        found.append([one.grad.full_tensor() for one in model.parameters()])
    return names, same(*found)


def whole() -> Any:
    """One module's parameters are unsharded, and its neighbours' are not; values that were put there are followed."""
    model = deep(policy=EAGER)
    train(model, 1)
    model.layers[4].unshard()
    kinds = [type(layer.linear.weight).__name__ for layer in model.layers[3:6]]
    model.layers[4].reshard()
    state = {name: torch.zeros_like(value) for name, value in model.layers[4].state_dict().items()}
    model.layers[4].load_state_dict(state, assign=True)
    train(model, 1)
    return kinds, units(model)


def main() -> list[Any]:
    cases = (collectives, numbers, local_tensors, writes, treated_apart, alone, whole)
    return of_all({case.__name__: case() for case in cases})


if __name__ == "__main__":
    answer(main)
