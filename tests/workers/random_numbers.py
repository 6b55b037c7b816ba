"""Two ranks with one seed: what their programs draw, beside what the user draws; rank 0 writes both ranks' numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.launch import answer, of_all

WIDE = 2**62


def draw(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).square().mean(), (torch.randn(200), torch.randint(WIDE, (40,)))


def drop(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).mean(), nn.functional.dropout(torch.ones(200), 0.5)


def make(loss: Callable[..., Any] = draw, lower: str = "eager") -> Sharded:
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower=lower))


X = torch.ones(2, 4)


def noise(sharded: Sharded) -> list[float]:
    return sharded.step(X)[1][0].tolist()


def streams() -> dict[str, list[float]]:
    """Noise of 200 numbers each, all under one seed."""
    torch.manual_seed(3)
    first, second = make(), make()
    torch.manual_seed(3)
    found = {"outside": torch.randn(200).tolist()}
    torch.manual_seed(3)
    for step in range(2):
        found |= {f"first {step}": noise(first), f"outside {step}": torch.randn(200).tolist()}
        found |= {f"second {step}": noise(second)}
    return found


def repeats() -> dict[str, bool]:
    sharded = make()
    noises = []
    for _ in range(2):  # the same seed again, after other draws
        torch.manual_seed(5)
        noises.append((noise(sharded), torch.randn(3).tolist(), noise(sharded)))
        torch.randn(7)
    saved = sharded.state.random.clone()
    expected = noise(sharded)
    torch.randn(7)
    sharded.state.random.copy_(saved)
    restored = noise(sharded)
    clones = [pytree.tree_map(torch.clone, sharded.state) for _ in range(2)]
    drawn = torch.get_rng_state()
    applied = []
    for clone in clones:
        new, (_, (values, _)) = sharded.apply(clone, X)
        applied.append([values.tolist(), new.random.tolist()])
        applied[-1].append(sharded.apply(new, X)[1][1][0].tolist())
    untouched = torch.equal(drawn, torch.get_rng_state())
    live = noise(sharded)
    return {
        "reseeding": noises[0] == noises[1],
        "restoring": restored == expected,
        "equal states": applied[0] == applied[1] and applied[0][0] != applied[0][2],
        "apply moves no other generator": untouched,
        "step is apply": live == applied[0][0],
        "moves on": len({tuple(one) for one in (noises[0][0], noises[0][2], expected, live)}) == 4,
    }


def threads(around: Callable[[], Any] | None = None) -> int:
    """How many numbers were drawn twice: by a thread, by this one, or by the program."""
    torch.manual_seed(7)
    sharded = make()
    sharded.step(X)  # compiled: see the README for threads that draw meanwhile
    stop, begun, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        while not stop.is_set():
            seen.append(torch.randint(WIDE, (20,)))
            begun.set()
            time.sleep(1e-4)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    mine = []
    for _ in range(20):
        if around is None:
            mine.append(sharded.step(X)[1][1])
        else:
            with around():
                mine.append(sharded.step(X)[1][1])
        mine.append(torch.randint(WIDE, (20,)))
    stop.set()
    thread.join()
    everything = torch.cat([*seen, *mine]).tolist()
    return len(everything) - len(set(everything))


def refused() -> list[str]:
    import random

    rank = dist.get_rank()

    def unlucky(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() * (random.randint(1, 9) if rank else 1)

    sharded = make(unlucky)
    before = sharded.full_state_dict()
    try:
        sharded.step(X)
    except (RuntimeError, ValueError) as error:
        after = sharded.full_state_dict()
        return [type(error).__name__, str(error), str(all(torch.equal(before[name], after[name]) for name in before))]
    return ["nothing"]


def masks() -> list[list[float]]:
    """Of Inductor's lowering, whose random operators stand between the compiled pieces."""
    torch.manual_seed(3)
    sharded = make(drop, "inductor")
    return [sharded.step(X)[1].tolist() for _ in range(2)]


def main(*again: str) -> list[Any]:
    """What fresh processes have in common, and, unless ``again``, what one run shows."""
    found: dict[str, Any] = {"streams": streams(), "masks": masks()}
    if not again:
        found |= {"repeats": repeats(), "threads": threads(), "control": threads(torch.random.fork_rng)}
        found |= {"refused": refused()}
    return of_all(found)


if __name__ == "__main__":
    answer(main)
