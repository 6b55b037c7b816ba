"""`fsdp-compiled check`: every test of this machine, a line each as it is done, and one file to send with a report."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp_compiled.cli.check.options import RESULT, CheckOptions
from fsdp_compiled.cli.check.tests import ALONE, TOGETHER, results
from fsdp_compiled.cli.launch import launch
from fsdp_compiled.cli.machine import hardware, versions
from fsdp_compiled.cli.rank import place, under_launcher

ROW = "{:<28}{:<9}{}"


def start(options: CheckOptions, arguments: Sequence[str]) -> int:
    """Runs the tests, those between ranks as ranks; 1 where one fails."""
    if under_launcher():
        return _rank(options)
    if options.nproc is not None and options.nproc < 2:
        raise ValueError(f"--nproc is {options.nproc}; expected 2 or more, since collectives are between ranks.")
    gpus = torch.cuda.device_count()
    if gpus > 1 and options.nproc is not None and options.nproc > gpus:
        raise ValueError(f"--nproc {options.nproc}: this machine has {gpus} GPUs, and each process needs its own.")
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out: {options.out} cannot be made ({error}); give another folder.") from None
    found = {"torch": torch.__version__, "hardware": hardware(), "versions": versions("triton")}
    print(f"torch {torch.__version__}, {hardware()}\n", flush=True)
    print(ROW.format("test", "", "found"), flush=True)
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    logging.getLogger("fsdp_compiled").addHandler(logging.NullHandler())  # warnings are told by the tests
    rows = _shown(ALONE, device)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        (out / "logs").mkdir(parents=True, exist_ok=True)
        # With one GPU, ranks share the CPU: what is between them is the same, but for NCCL.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if gpus == 1 else {}
        command = [sys.executable, "-m", "fsdp_compiled", "check", "--out", str(out)]
        code = launch(command, options.nproc or max(gpus, 2), out / "logs", hidden, "check")
        part = out / "ranks.json"
        rows += [tuple(row) for row in json.loads(part.read_text())] if part.exists() else []
        part.unlink(missing_ok=True)
    if code and len(rows) < len(ALONE) + len(TOGETHER):
        rows.append(("ranks", "FAILED", f"a rank ended with exit code {code}"))
        print(ROW.format(*rows[-1]), flush=True)
    failed = [name for name, verdict, _ in rows if verdict == "FAILED"]
    if options.out is not None:
        (options.out / RESULT).write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")
    print(f"\n{_sentence(rows, failed, options.out)}", flush=True)
    return 1 if failed else 0


def _shown(tests: tuple[object, ...], device: torch.device, first: bool = True) -> list[tuple[str, str, str]]:
    rows = []
    for row in results(tests, device):  # type: ignore[arg-type]
        rows.append(row)
        if first:
            print(ROW.format(*row), flush=True)
    return rows


def _sentence(rows: Sequence[tuple[str, str, str]], failed: Sequence[str], out: Path | None) -> str:
    if failed:
        where = f"{out / RESULT}" if out is not None else "what --out FOLDER writes"
        return f"{len(failed)} of {len(rows)} failed: {', '.join(failed)}. Please report it, with {where}."
    skipped = sum(verdict == "skipped" for _, verdict, _ in rows)
    return f"all is well: {len(rows) - skipped} passed" + (f", {skipped} skipped" if skipped else "")


def _rank(options: CheckOptions) -> int:
    import torch.distributed as dist

    from fsdp_compiled.distributed.device_mesh import connect

    here = place()
    connect(None, here.device)
    rows = _shown(TOGETHER, here.device, here.first)
    every: list[list[tuple[str, str, str]]] = [[] for _ in range(here.world)]
    dist.all_gather_object(every, rows)
    if here.first and options.out is not None:
        # Of each test, the first rank that has something to say against it.
        worst = [next((row for row in row_of if row[1] == "FAILED"), row_of[0]) for row_of in zip(*every, strict=True)]
        (options.out / "ranks.json").write_text(json.dumps(worst))
    return 0
