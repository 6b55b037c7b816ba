"""`fsdp-compiled compile SCRIPT --out BUNDLE`: what a script compiles, in one file, for other machines to load."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_compiled.capture import disk_cache
from fsdp_compiled.capture.cache_folder import VARIABLE as CACHE
from fsdp_compiled.cli.launch import launch
from fsdp_compiled.lower.bundle import CALLS, FOLDER, VARIABLE, write_bundle
from fsdp_compiled.lower.cpp_compiler import PROBES

IDLE_CALLS = 8  # calls in a row that compile nothing


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the training script, as torchrun would run it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="the file to write")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks, as many as there will be (default 1)")
    parser.add_argument(
        "--calls", type=int, default=IDLE_CALLS, metavar="N",
        help=f"end the script when N calls in a row have compiled nothing (default {IDLE_CALLS}); 0: never",
    )  # fmt: skip


def run_compile(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the script in a cache folder of its own, and packs what it leaves there; returns the exit code."""
    script, nproc = chosen.script, chosen.nproc
    if not script.is_file():
        raise ValueError(f"{script} does not exist; give a Python script")
    if nproc < 1 or chosen.calls < 0:
        raise ValueError(f"--nproc {nproc} --calls {chosen.calls}: expected 1 or more, and 0 or more")
    with tempfile.TemporaryDirectory(prefix="fsdp_compiled_") as own_folder:
        cache, notes, logs = (Path(own_folder, name) for name in ("cache", "notes", "logs"))
        for folder in (cache, notes, logs):
            folder.mkdir()
        own = disk_cache.folder()
        if own is not None and (own / PROBES).is_dir():  # what this machine's compiler was found to be good for
            shutil.copytree(own / PROBES, cache / own.name / PROBES)
        environment = {CACHE: str(cache), FOLDER: str(notes), CALLS: str(chosen.calls)}
        if nproc > 1:
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # as torchrun has it
        command = [sys.executable, str(script), *chosen.arguments]
        if code := launch(command, nproc, logs, environment, name="compile"):
            return code
        made_for = _made_for(notes, nproc)
        count = write_bundle(cache, chosen.out, made_for, script.name, script.read_bytes())
    size = chosen.out.stat().st_size / 2**20
    print(f"{chosen.out}: {count} compiled files, {size:.1f} MiB. To start from it: {VARIABLE}={chosen.out}")
    return 0


def _made_for(notes: Path, ranks: int) -> Mapping[str, Any]:
    """What the ranks' code depends on. Raises ``ValueError`` if they compiled nothing, or each something else."""
    found = [json.loads(path.read_text()) for path in sorted(notes.glob("rank*.json"))]
    if len(found) != ranks:
        raise ValueError(
            f"{len(found)} of {ranks} ranks compiled a program. Does the script call compile_sharded or fully_shard, "
            "and train a step? A bundle of nothing is not written."
        )
    if any(one != found[0] for one in found):
        raise ValueError("the ranks' processors, GPUs or settings are different ones: a bundle is for one kind")
    return found[0]  # type: ignore[no-any-return]
