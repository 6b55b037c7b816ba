"""What two choices for CPUs rest on: who multiplies matrices faster, and what a reduce-scatter over gloo costs.

    torchrun --standalone --nproc-per-node 2 -m bench.library_choices bench/results/choices.json

Each way takes turns with the other; the medians are written. On a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compiled.cli.machine import hardware, versions
from fsdp_compiled.kernels.products import product
from fsdp_compiled.lower.fusions.exchange import combine

SHAPES = ((32, 64, 256), (128, 256, 256), (512, 256, 1024), (2048, 512, 512))  # rows, inner, columns
SIZES = (0.5, 2, 8, 32)  # MiB of a whole buffer
ROUNDS = 9
c10d = torch.ops._c10d_functional


def medians(ways: Mapping[str, Callable[[], object]], together: bool) -> dict[str, dict[str, float]]:
    """Of each way, the milliseconds of one call: on the wall, and of this process's threads."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for turn in range(ROUNDS + 1):
        for name, call in ways.items():
            if together:
                dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(10):
                call()
            taken = time.perf_counter() - wall, time.process_time() - cpu
            if turn:  # the first is for caches and connections
                for row, seconds in zip(found[name], taken, strict=True):
                    row.append(seconds * 100)
    return {
        name: {"wall_ms": statistics.median(wall), "cpu_ms": statistics.median(cpu)}
        for name, (wall, cpu) in found.items()
    }


def products() -> list[dict[str, Any]]:
    """float32, both operands contiguous; run by one rank while the others wait."""
    found = []
    for m, k, n in SHAPES:
        left, right = torch.randn(m, k), torch.randn(k, n)
        ways = {"blas": lambda: torch.mm(left, right), "onednn": lambda: product(left, right)}  # noqa: B023
        taken = medians(ways, together=False)
        gigaflops = {name: 2e-6 * m * k * n / ms["wall_ms"] for name, ms in taken.items()}
        found.append({"shape": [m, k, n], "gigaflops": gigaflops})
    return found


def reductions() -> list[dict[str, Any]]:
    """The mean over the ranks of a float32 buffer, a slice each."""
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    found = []
    for mib in SIZES:
        whole = torch.randn(int(mib * 2**18) // world * world)
        slices = [whole.numel() // world] * world

        def reduced() -> torch.Tensor:
            return c10d.wait_tensor(c10d.reduce_scatter_tensor(whole, "avg", world, group.group_name))  # noqa: B023

        def exchanged() -> torch.Tensor:
            rows = c10d.all_to_all_single(whole, slices, slices, group.group_name)  # noqa: B023
            return combine(c10d.wait_tensor(rows), world, "avg")

        torch.testing.assert_close(exchanged(), reduced())
        found.append({"mib": mib, **medians({"reduce_scatter": reduced, "exchange": exchanged}, together=True)})
    return found


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sent = reductions()
    dist.barrier()
    if dist.get_rank() == 0:
        result = {
            "command": f"torchrun --standalone --nproc-per-node {dist.get_world_size()} -m {__spec__.name}",
            "hardware": hardware(),
            "versions": versions(),
            "load": os.getloadavg()[0],
            "products": products(),
            "reductions": sent,
        }
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
