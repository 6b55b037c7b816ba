"""What a start costs, part by part: formulas of ranks, bytes and layers, with constants that are measured here.

    python -m bench.starting bench/results/starting.json

`PARTS` has them. The constants are of this machine's processor and of gloo between two processes, the least of some
rounds; capture and compilation are those of `bench.first_step_parts`. The table says what they make of more ranks. No
cluster was measured, and no GPU: there, a model is drawn at the memory's rate, and sent at NCCL's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli.gpt import GPT, GPTConfig
from fsdp_compiled.cli.machine import hardware, versions
from fsdp_compiled.distributed.mesh import Mesh, agree

CLIENTS, AGREEMENTS, ROUNDS, LIMIT = 256, 200, 3, 300.0
MODEL = GPTConfig(8, 1024, 8, 64)  # 0.4 GB in float32
ADAM = 3  # a checkpoint holds parameters and two moments
HOST = 8  # ranks that share a cache on disk
CASES = (("8B, 32 layers", 8.0e9, 32, 64), ("8B, 32 layers", 8.0e9, 32, 1024), ("405B, 126 layers", 405e9, 126, 16384))
WORKER = "import sys; from bench.starting import rank; rank(*sys.argv[1:])"


class Part(NamedTuple):
    formula: str
    seconds: Callable[[Mapping[str, float], float, int, int], float]  # by constants, GB of parameters, layers, ranks
    grows: str


PARTS = {
    "connecting to the store": Part(
        "ranks x c", lambda c, gb, layers, ranks: ranks * c["c"], "with the ranks: one thread takes them in"
    ),
    "agreeing on model and policy": Part(
        "log2(ranks) x a", lambda c, gb, layers, ranks: math.log2(ranks) * c["a"], "hardly: a reduction of digests"
    ),
    "taking the model over": Part(
        "GB x (d + s) + layers x log2(ranks) x a",
        lambda c, gb, layers, ranks: gb * (c["d"] + c["s"]) + layers * math.log2(ranks) * c["a"],
        "with the model: each rank draws all of it, a unit at a time, and gets the first rank's values",
    ),
    "capture": Part(
        "k + layers x t", lambda c, gb, layers, ranks: c["k"] + layers * c["t"], "with layers: every rank by itself"
    ),
    "compiling": Part(
        "p / ranks of a host",
        lambda c, gb, layers, ranks: c["p"] / min(ranks, HOST),
        "with distinct blocks, not with layers; once a host, or once for all by a shared folder or a bundle",
    ),
    "loading a checkpoint": Part(
        f"{ADAM} x GB / ranks x r", lambda c, gb, layers, ranks: ADAM * gb / ranks * c["r"], "with what a rank holds"
    ),
}


def connecting() -> float:
    """Processor time of the store's thread for a client that connects and sets one key, in seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = (
        "import torch.distributed as dist\n"
        f'kept = [dist.TCPStore("127.0.0.1", {store.port}, is_master=False) for _ in range({CLIENTS})]\n'
        'for one in kept: one.set("here", "")\n'
    )
    began = time.process_time()
    subprocess.run([sys.executable, "-c", script], check=True)
    return (time.process_time() - began) / CLIENTS


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()  # type: ignore[no-any-return]


def fill(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    for buffer in module._buffers.values():
        if buffer is not None:
            buffer.zero_()


def taking_over() -> tuple[Any, float]:
    with torch.device("meta"):
        model = GPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.perf_counter()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"), init=fill)
    return sharded, time.perf_counter() - began


def loading(sharded: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        sharded.save(folder, wait=True)
        began = time.perf_counter()
        sharded.load(folder)
        return time.perf_counter() - began


def rank(number: str, port: str) -> None:
    """One of two: prints how long an agreement and a model's taking over last between them."""
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(number), world_size=2)
    torch.set_num_threads(1)
    mesh = Mesh(torch.device("cpu"), shard=2, rank=int(number))
    agree(mesh, "this", "text")
    began = time.perf_counter()
    for _ in range(AGREEMENTS):
        agree(mesh, "this", "text")
    agreed = (time.perf_counter() - began) / AGREEMENTS
    print(json.dumps([agreed, taking_over()[1]]), flush=True)
    dist.barrier()


def between_two() -> list[float]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", WORKER]
    ranks = [subprocess.Popen([*command, str(n), str(store.port)], stdout=subprocess.PIPE, text=True) for n in range(2)]
    said = [json.loads(one.communicate(timeout=LIMIT)[0].splitlines()[-1]) for one in ranks]
    return [max(values) for values in zip(*said, strict=True)]


def constants(results: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    gigabytes = sum(one.numel() for one in GPT(MODEL).parameters()) * 4 / 1e9
    rounds = []
    for number in range(ROUNDS):
        sharded, alone = taking_over()
        tokens = torch.zeros(1, MODEL.context, dtype=torch.int64)
        sharded.step(tokens)  # makes the moments
        read = loading(sharded)
        agreed, both = between_two()
        rounds.append((connecting(), agreed, alone / gigabytes, (both - alone) / gigabytes, read / gigabytes / ADAM))
        print(f"round {number + 1} of {ROUNDS}: {rounds[-1]}", flush=True)
    found = dict(zip("cadsr", map(min, zip(*rounds, strict=True)), strict=True))
    eager, compiled = (
        json.loads((results / f"first-step-parts{kind}.json").read_text())["seconds of processor time"]["now"]
        for kind in ("", "-inductor")
    )
    few, many = min(eager, key=lambda row: row["layers"]), max(eager, key=lambda row: row["layers"])
    slope = (many["all"] - few["all"]) / (many["layers"] - few["layers"])
    cold = next(row for row in compiled if row["disk"] == "nothing on disk")
    compilers = "compilers, processes of their own"
    return found | {"t": slope, "k": few["all"] - slope * few["layers"], "p": cold["compiling"] + cold[compilers]}


def describe(result: Mapping[str, Any]) -> str:
    """A table: a line for each part."""
    found = result["constants"]
    names = (f"{model}, {ranks:,} ranks" for model, _, _, ranks in CASES)
    lines = [f"| seconds | formula | {' | '.join(names)} | grows |", "|---|---|" + "--:|" * len(CASES) + "---|"]
    for name, part in PARTS.items():
        numbers = (part.seconds(found, size * 4 / 1e9, layers, ranks) for _, size, layers, ranks in CASES)
        lines.append(f"| {name} | {part.formula} | {' | '.join(f'{one:,.2g}' for one in numbers)} | {part.grows} |")
    micro = ", ".join(f"{name} = {1e6 * found[name]:.0f} us" for name in "cat")
    whole = ", ".join(f"{name} = {found[name]:.2f} s" for name in "dsrkp")
    said = f"{micro}; {whole}; those of d, s and r are for a GB of float32. All of this machine's processor."
    return "\n".join([*lines, "", said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    found = constants(given.out.parent)
    command = f"python -m bench.starting {given.out}"
    record = {"command": command, "hardware": hardware(), "versions": versions(), "constants": found}
    given.out.write_text(json.dumps(record, indent=2) + "\n")
    print(describe(record))


if __name__ == "__main__":
    main()
