"""Muon on whole matrices: what its update takes a rank, beside unsharded Muon and FSDP2 with Muon.

In each round all have their turn, on models of the same size, and ranks begin each update together. Timed is that of
the blocks' matrices alone: `torch.optim.Muon.step`, and here what follows the program, messages to owners and back
included. Unsharded, every rank updates all of them; its share is that divided by the ranks. Processor times are of all
the process's threads, a rank's mean; wall times are those of the slowest rank.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon

from bench.checkpoint import Seconds, of_ranks
from bench.network import slow_network
from bench.presets import Batch, Preset, on_device, rows_of_rank
from bench.rivals import ADAMW, Setting
from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli.rank import RankInfo

GOAL = 1.2  # of the share, by processor time
TITLES = {
    "alone": "unsharded Muon",
    "ours": "this package",
    "fsdp2": "FSDP2",
}
Wire = Callable[[], AbstractContextManager[Any]]  # what an update is timed on
Turn = Callable[[], Seconds]  # a step; what its update took on this rank, on the wall and of the processor


def measure_muon(
    preset: Preset, here: RankInfo, seed: int, rounds: int, gbps: float | None = None, latency_ms: float = 0.0
) -> dict[str, Any]:
    """Seconds of updates by who made them, of each round those of its steps; the sizes and the conditions.

    ``gbps``, ``latency_ms``: of a simulated network.
    """
    load = os.getloadavg()[0]
    setting = Setting(preset, here, seed)
    batch = on_device([rows_of_rank(preset.batches(here.world, seed, 1)[0], here.rank, preset.batch)], here.device)[0]
    wire = nullcontext if gbps is None else partial(slow_network, gbps, latency_ms / 1e3)
    turns: dict[str, Turn] = {
        "alone": _eager(setting, batch, wire),
        "ours": _ours(setting, batch, wire, gbps),
        "fsdp2": _eager(setting, batch, wire, _by_blocks),
    }
    names = [*turns]
    found: dict[str, list[list[Seconds]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            seconds = []
            for _ in range(preset.steps):
                dist.barrier()
                wall, processor = turns[name]()
                seconds.append(of_ranks(wall, processor, here))
            if number:  # the first warms up
                found[name].append(seconds)
    matrices = _matrices(setting, setting.model())
    return {
        "matrices": len(matrices),
        "bytes": sum(matrix.numel() * matrix.itemsize for matrix in matrices),
        "conditions": {
            "world": here.world,
            "device": here.device.type,
            "threads a rank": torch.get_num_threads(),
            "network": None if gbps is None else f"{gbps:g} Gb/s, {latency_ms:g} ms a message, simulated",
            "load average before and after": [round(load, 1), round(os.getloadavg()[0], 1)],
        },
        "seconds": found,
    }


def _matrices(setting: Setting, model: nn.Module) -> list[nn.Parameter]:
    return [one for block in setting.preset.blocks(model) for one in block.parameters() if one.dim() == 2]


def _two(setting: Setting, model: nn.Module, fused: bool) -> tuple[Muon, AdamW]:
    matrices = _matrices(setting, model)
    known = set(map(id, matrices))
    rest = [one for one in model.parameters() if id(one) not in known]
    return Muon(matrices, lr=1e-3), AdamW(rest, fused=fused, **ADAMW)


def _by_blocks(setting: Setting, model: nn.Module) -> None:
    mesh = init_device_mesh(setting.here.device.type, (dist.get_world_size(),))
    for block in setting.preset.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _eager(
    setting: Setting, batch: Batch, wire: Wire, shard: Callable[[Setting, nn.Module], None] | None = None
) -> Turn:
    model = setting.model()
    if shard is not None:
        shard(setting, model)
    muon, adamw = _two(setting, model, fused=True)

    def turn() -> Seconds:
        setting.preset.loss(model, *batch).backward()
        seconds = _timed(muon.step, setting.here, wire)
        adamw.step()
        for one in (muon, adamw):
            one.zero_grad()
        return seconds

    return turn


def _ours(setting: Setting, batch: Batch, wire: Wire, gbps: float | None) -> Turn:
    model = setting.model()
    policy = Policy(lower="eager", network=gbps)
    sharded = compile_sharded(model, [*_two(setting, model, fused=False)], loss=setting.preset.loss, policy=policy)
    (update,) = sharded._updates
    run = update.run
    taken: list[Seconds] = []

    def timed(*given: Any) -> None:
        taken.append(_timed(lambda: run(*given), setting.here, wire))

    update.run = timed  # type: ignore[method-assign, assignment]

    def turn() -> Seconds:
        sharded.step(*batch)
        return taken.pop()

    return turn


def _timed(call: Callable[[], Any], here: RankInfo, wire: Wire) -> Seconds:
    """On this rank. Ranks begin together: what one waits for another's backward pass is no part of an update."""
    if here.device.type == "cuda":
        torch.cuda.synchronize()
    with wire():
        dist.barrier()
        begun, used = time.perf_counter(), time.process_time()
        call()
        if here.device.type == "cuda":
            torch.cuda.synchronize()
        return [time.perf_counter() - begun, time.process_time() - used]


def ratio(measured: Mapping[str, Any], name: str, clock: int) -> float:
    """To the share of one rank of the unsharded update, the median of each round's; ``clock``: 0 the wall's, 1 the
    processor's."""
    world, seconds = measured["conditions"]["world"], measured["seconds"]
    pairs = zip(seconds[name], seconds["alone"], strict=True)
    return statistics.median(_middle(mine, clock) / (_middle(alone, clock) / world) for mine, alone in pairs)


def _middle(steps: list[Seconds], clock: int) -> float:
    return statistics.median(one[clock] for one in steps)


def describe(measured: Mapping[str, Any]) -> str:
    """A table of medians, with ratios that are medians of rounds, and whether the goal was met."""
    conditions, seconds = measured["conditions"], measured["seconds"]
    before, after = conditions["load average before and after"]
    reached = ratio(measured, "ours", 1)
    network = f", {found}" if (found := conditions.get("network")) else ""
    lines = [
        f"Muon's update of {measured['matrices']} matrices, {measured['bytes'] / 2**20:.1f} MiB, on "
        f"{conditions['world']} ranks{network}, {len(seconds['ours'])} rounds. Load average before and after: "
        f"{before:.1f}, {after:.1f}.",
        "",
        "| | processor time a rank | × its share | wall time | × its share |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, title in ((name, title) for name, title in TITLES.items() if name in seconds):
        cells = []
        for clock in (1, 0):
            middle = statistics.median(_middle(one, clock) for one in seconds[name])
            cells += [f"{1e3 * middle:.1f} ms", f"{ratio(measured, name, clock):.2f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    if network:
        return "\n".join(lines)
    met = "met" if reached <= GOAL else "**missed**"
    return "\n".join([*lines, "", f"Goal: processor time at most {GOAL} times the share; {reached:.2f}, {met}."])
