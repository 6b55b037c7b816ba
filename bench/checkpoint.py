"""Checkpoints: how long a step waits for one, until it is on the disk, and until it is loaded; beside FSDP2 with DCP.

In each round all have their turn, begun by all ranks together, on states of the same size on the same disk, and the
copy of this rank's state to other memory is timed too, which is the least that any of them has to do. Wall times are
those of the slowest rank; processor times, which other processes on the machine disturb less, a rank's mean: of the
thread that trains for what a step waits, of all the process's threads for the rest. What DCP is given is made outside
of them (`get_state_dict`), and what it loaded is put into the model outside of them (`set_state_dict`); this package's
own times have all of that in them, and checksums. `async_save` has a process group of its own: with the one that
trains, its thread's collectives meet those of the main thread, and all wait forever.
"""

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from bench.presets import Preset, on_device, rows_of_rank
from bench.rivals import ADAMW, Setting
from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli.rank import RankInfo

Seconds = list[float]  # on the wall, and of the processor
Taken = dict[str, Seconds]  # by what was done
# What this package's figure may be of the other's: the step's stall of one copy, save and load of DCP's.
GOALS = (
    ("what the step waits, of one copy of the state", 1.1, "stall", "copy"),
    ("until it is saved, of DCP's `save`", 1.0, "save", "dcp"),
    ("load, of DCP's", 1.0, "load", "dcp"),
)
TITLES = {
    "copy": "one copy of the state",
    "ours": "this package, `save`",
    "dcp": "FSDP2, DCP `save`",
    "dcp-async": "FSDP2, DCP `async_save`",
}


def measure_checkpoint(preset: Preset, here: RankInfo, seed: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds by who did what, one of each round; the bytes of a rank's state and on the disk; the conditions."""
    load = os.getloadavg()[0]
    setting = Setting(preset, here, seed)
    rows = rows_of_rank(preset.batches(here.world, seed, 1)[0], here.rank, preset.batch)
    batch = on_device([rows], here.device)[0]
    model = setting.model()
    optimizer = AdamW(model.parameters(), **ADAMW)
    sharded = compile_sharded(model, optimizer, loss=preset.loss, policy=Policy(lower="eager"))
    sharded.step(*batch)
    theirs = _fsdp2(setting, batch)
    state = [*sharded.state.parameters.values(), *sharded.state.optimizer.values()]
    room = [torch.empty_like(tensor) for tensor in state]
    apart = dist.new_group(backend="gloo")

    def copy() -> None:
        for to, source in zip(room, state):
            to.copy_(source)

    found: dict[str, list[Taken]] = {name: [] for name in TITLES}
    sizes: dict[str, int] = {}
    first: Seconds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's own, of its own parts
        for number in range(rounds + 1):
            place = folder / str(number)
            turns: Mapping[str, Callable[[], Taken]] = {
                "copy": lambda: {"stall": _timed(copy, here, time.thread_time)},
                "ours": lambda place=place: _ours(sharded, place / "ours", here),  # type: ignore[misc]
                "dcp": lambda place=place: _dcp(theirs, place / "dcp", here),  # type: ignore[misc]
                "dcp-async": lambda place=place: _async(theirs, place / "dcp-async", here, apart),  # type: ignore[misc]
            }
            names = [*turns][number % 4 :] + [*turns][: number % 4]
            for name in names:
                taken = turns[name]()
                if number:
                    found[name].append(taken)
                elif name == "ours":  # the first warms up, and gets the memory that it copies into
                    first = taken["stall"]
            dist.barrier()
            if here.first:
                sizes = {name: _size(place / name) for name in ("ours", "dcp")}
                shutil.rmtree(place)
            dist.barrier()
    conditions = {
        "world": here.world,
        "device": here.device.type,
        "threads a rank": torch.get_num_threads(),
        "load average before and after": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    size = sum(tensor.numel() * tensor.itemsize for tensor in state)
    return {"state_bytes": size, "disk_bytes": sizes, "conditions": conditions, "first stall": first, "seconds": found}


def _fsdp2(setting: Setting, batch: Any) -> Callable[[], dict[str, Any]]:
    """Its state, anew at each call, after one step."""
    model = setting.model()
    mesh = init_device_mesh(setting.here.device.type, (dist.get_world_size(),))
    for block in setting.preset.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), fused=True, **ADAMW)
    setting.preset.loss(model, *batch).backward()
    optimizer.step()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    return state


def _timed(call: Callable[[], Any], here: RankInfo, clock: Callable[[], float] = time.process_time) -> Seconds:
    """Of the slowest rank, from when all begin; and by this clock, a rank's mean."""
    dist.barrier()
    begun, used = time.perf_counter(), clock()
    call()
    if here.device.type == "cuda":
        torch.cuda.synchronize()
    return of_ranks(time.perf_counter() - begun, clock() - used, here)


def of_ranks(wall: float, processor: float, here: RankInfo) -> Seconds:
    slowest, every = (torch.tensor(one, device=here.device) for one in (wall, processor))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(every)
    return [float(slowest), float(every) / here.world]


def _saved(save: Callable[[], Any], here: RankInfo) -> Taken:
    """What a step waits for a save in the background, and what there is until it is on the disk."""
    stall: list[float] = []

    def both() -> None:
        begun, used = time.perf_counter(), time.thread_time()
        future = save()
        stall.extend((time.perf_counter() - begun, time.thread_time() - used))
        future.result()

    whole = _timed(both, here)
    return {"stall": of_ranks(stall[0], stall[1], here), "save": whole}


def _ours(sharded: Any, folder: Path, here: RankInfo) -> Taken:
    return {**_saved(lambda: sharded.save(folder), here), "load": _timed(lambda: sharded.load(folder), here)}


def _dcp(state: Callable[[], dict[str, Any]], folder: Path, here: RankInfo) -> Taken:
    given = state()
    save = _timed(lambda: dcp.save(given, checkpoint_id=folder), here)
    return {"stall": save, "save": save, "load": _timed(lambda: dcp.load(given, checkpoint_id=folder), here)}


def _async(state: Callable[[], dict[str, Any]], folder: Path, here: RankInfo, group: Any) -> Taken:
    given = state()
    return _saved(lambda: dcp.async_save(given, checkpoint_id=folder, process_group=group), here)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def describe(measured: Mapping[str, Any]) -> str:
    """Two tables of medians, of wall and of processor time, with ratios that are medians of rounds."""
    count = len(measured["seconds"]["ours"])
    head = (
        f"Checkpoints of {measured['state_bytes'] / 2**20:.0f} MiB a rank, {count} rounds; "
        f"on the disk {measured['disk_bytes']['ours'] / 2**20:.0f} MiB, DCP "
        f"{measured['disk_bytes']['dcp'] / 2**20:.0f} MiB. Processes read what they have just written."
    )
    if "conditions" in measured:
        before, after = measured["conditions"]["load average before and after"]
        head += f" Load average before and after: {before:.1f}, {after:.1f}."
    if measured.get("first stall"):
        head += f" The first save, into fresh memory, waits {1e3 * measured['first stall'][0]:.0f} ms."
    return "\n".join(
        [head, "", *_table(measured, 0, "wall time"), "", *_table(measured, 1, "processor time of a rank")]
    )


def ratio(measured: Mapping[str, Any], name: str, what: str, to: str, clock: int) -> float | None:
    """The median of each round's ratio; ``clock``: 0 the wall's, 1 the processor's."""
    seconds = measured["seconds"]
    pairs = [
        (a[what][clock], b[what][clock]) for a, b in zip(seconds[name], seconds[to]) if what in a and what in b
    ]  # fmt: skip
    return statistics.median([a / b for a, b in pairs]) if pairs else None


def _table(measured: Mapping[str, Any], clock: int, title: str) -> list[str]:
    def middle(name: str, what: str) -> str:
        values = [one[what][clock] for one in measured["seconds"][name] if what in one]
        return f"{1e3 * statistics.median(values):.0f} ms" if values else "–"

    def against(name: str, what: str, to: str) -> str:
        found = ratio(measured, name, what, to, clock)
        return "–" if found is None else f"{found:.2f}"

    lines = [
        f"| {title} | the step waits | × a copy | until it is saved | × DCP | load | × DCP |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, described in TITLES.items():
        cells = [middle(name, "stall"), against(name, "stall", "copy")]
        for what in ("save", "load"):
            cells += [middle(name, what), against(name, what, "dcp")]
        lines.append(f"| {described} | {' | '.join(cells)} |")
    return lines
