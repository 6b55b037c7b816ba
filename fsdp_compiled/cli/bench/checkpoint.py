"""Checkpoints: how long a step waits for one, until it is on the disk, and until it is loaded; beside FSDP2 with DCP.

In each round all have their turn, begun by all ranks together, on states of the same size on the same disk, and the
copy of this rank's state to other memory is timed too, which is the least that any of them has to do. Times are those
of the slowest rank. What DCP is given is made outside of them (`get_state_dict`), and what it loaded is put into the
model outside of them (`set_state_dict`); this package's own times have all of that in them, and checksums.
"""

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

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli.bench.presets import Preset, on_device, rows_of_rank
from fsdp_compiled.cli.bench.rivals import ADAMW, Setting
from fsdp_compiled.cli.rank import RankInfo

Seconds = dict[str, float]
TITLES = {
    "copy": "one copy of the state",
    "ours": "this package, `save`",
    "dcp": "FSDP2, DCP `save`",
    "dcp-async": "FSDP2, DCP `async_save`",
}


def measure_checkpoint(preset: Preset, here: RankInfo, seed: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds by what was done, a list with one of each round, and the bytes of a rank's state and on the disk."""
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

    def copy() -> None:
        for to, source in zip(room, state):
            to.copy_(source)

    found: dict[str, list[Seconds]] = {name: [] for name in TITLES}
    sizes: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's own, of its own parts
        for number in range(rounds + 1):
            place = folder / str(number)
            turns: Mapping[str, Callable[[], Seconds]] = {
                "copy": lambda: {"stall": _timed(copy, here)},
                "ours": lambda place=place: _ours(sharded, place / "ours", here),  # type: ignore[misc]
                "dcp": lambda place=place: _dcp(theirs, place / "dcp", here),  # type: ignore[misc]
                "dcp-async": lambda place=place: _async(theirs, place / "dcp-async", here),  # type: ignore[misc]
            }
            names = [*turns][number % 4 :] + [*turns][: number % 4]
            for name in names:
                taken = turns[name]()
                if number:  # the first warms up
                    found[name].append(taken)
            dist.barrier()
            if here.first:
                sizes = {name: _size(place / name) for name in ("ours", "dcp")}
                shutil.rmtree(place)
            dist.barrier()
    return {"state_bytes": sum(t.numel() * t.itemsize for t in state), "disk_bytes": sizes, "seconds": found}


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


def _timed(call: Callable[[], Any], here: RankInfo) -> float:
    """Seconds of the slowest rank, from when all begin."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    if here.device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor(time.perf_counter() - begun, device=here.device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _ours(sharded: Any, folder: Path, here: RankInfo) -> Seconds:
    future: list[Any] = []
    stall = _timed(lambda: future.append(sharded.save(folder)), here)
    rest = _timed(lambda: future[0].result(), here)
    return {"stall": stall, "save": stall + rest, "load": _timed(lambda: sharded.load(folder), here)}


def _dcp(state: Callable[[], dict[str, Any]], folder: Path, here: RankInfo) -> Seconds:
    given = state()
    save = _timed(lambda: dcp.save(given, checkpoint_id=folder), here)
    return {"stall": save, "save": save, "load": _timed(lambda: dcp.load(given, checkpoint_id=folder), here)}


def _async(state: Callable[[], dict[str, Any]], folder: Path, here: RankInfo) -> Seconds:
    given = state()
    future: list[Any] = []
    stall = _timed(lambda: future.append(dcp.async_save(given, checkpoint_id=folder)), here)
    rest = _timed(lambda: future[0].result(), here)
    return {"stall": stall, "save": stall + rest}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def describe(measured: Mapping[str, Any]) -> str:
    """A table of medians, with ratios that are medians of rounds."""
    seconds = measured["seconds"]

    def middle(name: str, what: str) -> str:
        values = [one[what] for one in seconds[name] if what in one]
        return f"{1e3 * statistics.median(values):.0f} ms" if values else "–"

    def ratio(name: str, what: str, to: str) -> str:
        pairs = [(a[what], b[what]) for a, b in zip(seconds[name], seconds[to]) if what in a and what in b]
        return f"{statistics.median([a / b for a, b in pairs]):.2f}" if pairs else "–"

    lines = [
        f"Checkpoints of {measured['state_bytes'] / 2**20:.0f} MiB a rank, {len(seconds['ours'])} rounds; "
        f"on the disk {measured['disk_bytes']['ours'] / 2**20:.0f} MiB, DCP "
        f"{measured['disk_bytes']['dcp'] / 2**20:.0f} MiB. Processes read what they have just written.",
        "",
        "| | the step waits | × a copy | until it is saved | × DCP | load | × DCP |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, title in TITLES.items():
        cells = [middle(name, "stall"), ratio(name, "stall", "copy"), middle(name, "save"), ratio(name, "save", "dcp")]
        cells += [middle(name, "load"), ratio(name, "load", "dcp")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
