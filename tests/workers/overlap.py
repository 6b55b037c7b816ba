"""Steps on a slow network, with gathers ahead and without: what was on the wire when. torchrun overlap.py RESULT"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench.network import Network, slow_network
from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.analysis.timeline import Span, Timeline
from tests.launch import answer

WIDTH, ROWS, STEPS = 256, 512, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def main() -> dict[int, Any]:
    found = {}
    for ahead in (0, 1):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Policy(prefetch=ahead, bucket_mb=0, lower="eager")
        sharded = compile_sharded(model, optimizer, loss=lambda m, x: F.mse_loss(m(x), -x), policy=policy)
        x = torch.randn(ROWS, WIDTH)
        losses = [sharded.step(x).item()]  # compiled without the wire
        with slow_network(gigabits_per_second=1.0, latency=2e-3) as network:
            for _ in range(STEPS):
                dist.barrier()
                network.transfers.clear()
                began = time.monotonic()
                losses.append(sharded.step(x).item())
                ended = time.monotonic()
        found[ahead] = {"losses": losses, **measured(network, began, ended)}
    return found


def measured(network: Network, began: float, ended: float) -> dict[str, Any]:
    """Of one step: seconds on the wire, seconds that somebody waited because of it, and the picture of both."""
    spans, now = [], began
    for transfer in sorted(network.transfers, key=lambda one: one.waited or one.end):
        spans.append(Span("network", transfer.name, transfer.start - began, transfer.end - began))
        if transfer.exposed:
            waited = transfer.waited or now
            spans.append(Span("compute", "compute", now - began, waited - began))
            now = transfer.end
    spans.append(Span("compute", "compute", now - began, ended - began))
    timeline = Timeline(tuple(sorted(spans, key=lambda span: span.start)))
    return {
        "gathers": sum("allgather" in one.name for one in network.transfers),
        "wire": sum(one.end - one.start for one in network.transfers),
        "exposed": sum(one.exposed for one in network.transfers),
        "exposed gathers": sum(one.exposed for one in network.transfers if "allgather" in one.name),
        "wire of gathers": sum(one.end - one.start for one in network.transfers if "allgather" in one.name),
        "step": ended - began,
        "picture": timeline.text(),
    }


if __name__ == "__main__":
    answer(main)
