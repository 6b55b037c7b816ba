"""Peaks of a step as the benchmark counts them: FSDP2's, this package's, and with units merged as for the wire alone.

``torchrun peak_memory.py RESULT LOWER [control]``
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.observe import Observer
from bench.presets import PRESETS, rows_of_rank
from bench.rivals import RIVALS, Setting, Step, ours
from fsdp_compiled.cli.rank import RankInfo
from fsdp_compiled.cli.simulate import sized
from tests.chosen import examples
from tests.launch import answer

LAYERS = examples(12, 24)
HALF = 0.1 * LAYERS  # MiB, of 4.8 with all of the preset's 24


def peak(build: Callable[[Setting], Step], setting: Setting, batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Bytes and collectives."""
    observer = Observer(torch.device("cpu"))
    with observer.watching():
        step = build(setting)
        for _ in range(2):
            observer.step(lambda: step(*batch))
    assert observer.seen is not None
    return [observer.seen.peak_bytes, observer.seen.collectives]


def main(lower: str, control: str = "") -> dict[str, list[int]]:
    torch.set_num_threads(1)
    here = RankInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    preset = sized(PRESETS["thin"], layers=LAYERS)
    setting = Setting(preset, here, seed=0)
    batch = rows_of_rank(preset.batches(here.world, 0, 1)[0], here.rank, preset.batch)
    builds = {"fsdp2": RIVALS["fsdp2"].build, "ours": ours(lower)}
    if control:
        builds["merged"] = ours(lower, bucket_mb=HALF)
    return {name: peak(build, setting, batch) for name, build in builds.items()}


if __name__ == "__main__":
    answer(main)
