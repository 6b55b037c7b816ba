"""What the host does in a step beside launching the program: finding it, its guards, rates, inputs and results.

    python -m bench.host_time bench/results/host-time.json

No GPU is needed: the program's runner is replaced by one that returns what it returned before, so that what is left is
what a step costs where the program is one launch of a CUDA graph. Figures are the least of many calls, since a shared
machine only ever adds time; ``yardstick`` is what ``sum(range(1000))`` takes there, in the same minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded

REPEATS = 20_000
WIDTH, TOKENS, VOCABULARY = 32, 16, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(VOCABULARY, (2, TOKENS))
    return x, x.roll(-1, 1)


def unlaunched(layers: int) -> Sharded:
    """A model whose newest step does all but run."""
    torch.manual_seed(0)
    model = GPT(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
    sharded.step(*batch())
    (compiled,) = sharded._programs.cached
    runner = compiled.runner
    results: list[Any] = []

    def run(*given: Any) -> Any:
        results[:] = runner(*given)
        return results

    compiled.runner = run
    sharded.step(*batch())
    compiled.runner = lambda *given: results
    return sharded


def least(run: Callable[[], Any], repeats: int) -> float:
    """Microseconds."""
    found = 1 << 60
    for _ in range(repeats):
        begun = time.perf_counter_ns()
        run()
        found = min(found, time.perf_counter_ns() - begun)
    return found / 1000


def measured(layers: int, repeats: int) -> dict[str, float]:
    sharded, data = unlaunched(layers), batch()
    programs = sharded._programs
    (compiled,) = programs.cached
    return {
        "layers": layers,
        "step": least(lambda: sharded.step(*data), repeats),
        "of which guards": least(compiled.capture.guards.hold, repeats),
        "of which finding the program, guards too": least(lambda: programs.find("step", data, {}), repeats),
        "of which the model's parameters": least(sharded._taken.check, repeats),
        "yardstick": least(lambda: sum(range(1000)), repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="calls of each (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "command": f"python -m bench.host_time {arguments.out}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "microseconds": [measured(layers, arguments.repeats) for layers in (4, 24)],
    }
    for each in record["microseconds"]:
        print(each)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
