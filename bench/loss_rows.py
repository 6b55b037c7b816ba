"""A loss over a vocabulary of 128k, whole and in slices of rows: a step's peak memory, and its processor time.

python -m bench.loss_rows bench/results/loss-rows.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.observe import Observer
from fsdp_compiled import Policy, chunked_cross_entropy, compile_sharded
from fsdp_compiled.cli.machine import hardware, versions

CLASSES, WIDTH, ROWS, SLICE = 131_072, 64, 512, 64
ROUNDS = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embed(tokens)))


def whole(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.head(model.hidden(tokens)), targets)


def chunked(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return chunked_cross_entropy(model.hidden(tokens), model.head.weight, targets, rows=SLICE)


def sharded(lower: str, rows: int | None, loss: Callable[..., Tensor] = whole) -> Callable[..., Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower=lower, loss_rows=rows)).step


def plain() -> Callable[..., Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = whole(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


RIVALS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "plain PyTorch": plain,
    "eager": lambda: sharded("eager", None),
    f"eager, loss_rows={SLICE}": lambda: sharded("eager", SLICE),
    f"eager, chunked_cross_entropy(rows={SLICE})": lambda: sharded("eager", None, chunked),
    "inductor": lambda: sharded("inductor", None),
    f"inductor, loss_rows={SLICE}": lambda: sharded("inductor", SLICE),
}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    tokens, targets = torch.randint(256, (ROWS,)), torch.randint(CLASSES, (ROWS,))
    steps: dict[str, Callable[..., Tensor]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, build in RIVALS.items():
        observer = Observer(torch.device("cpu"))
        with observer.watching():
            step = steps[name] = build()
            losses = [observer.step(lambda: step(tokens, targets)).item() for _ in range(3)]  # noqa: B023
        assert observer.seen is not None
        found[name] = {"peak_bytes": observer.seen.peak_bytes, "losses": losses, "cpu": []}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            began = time.process_time()
            step(tokens, targets)
            found[name]["cpu"].append(time.process_time() - began)
    for name, one in found.items():
        print(f"{name:45} {one['peak_bytes'] / 2**20:7.0f} MiB {statistics.median(one['cpu']):6.2f} s  {one['losses']}")
    about = {"classes": CLASSES, "width": WIDTH, "rows": ROWS, "slice": SLICE}
    result = {"about": about, "versions": versions(), "hardware": hardware(), "rivals": found}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
