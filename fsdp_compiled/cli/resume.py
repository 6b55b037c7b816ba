"""Which run a checkpoint folder belongs to: run.json in it, beside the checkpoints.

The run's first start writes it. Each later start reads there in which run folder to go on and how many windows a step
takes. It is refused if it would go on with other numbers than the run began with.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fsdp_compiled.capture.disk_cache import whole_file
from fsdp_compiled.cli import clock, journal
from fsdp_compiled.cli.options import TrainOptions

FILE = "run.json"
# What a run keeps to the end; the text is checked by the loader. Where it runs may change: ranks, --shard, --lower,
# --batch; and --steps, for a run that turns out to need more.
KEPT = ("seed", "layers", "width", "heads", "context", "lr", "warmup", "weight_decay", "clip", "global_batch")


def find(folder: Path) -> dict[str, Any] | None:
    """What run.json in this folder says; None where there is none."""
    try:
        text = (folder / FILE).read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"--checkpoint: {folder} cannot be read ({error.strerror}); give another folder") from error
    try:
        found = json.loads(text)
        return {"out": str(found["out"]), "options": dict(found["options"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--checkpoint: {folder / FILE} is not what train writes there ({error}); give another folder"
        ) from error


def adopt(options: TrainOptions, found: dict[str, Any]) -> TrainOptions:
    """The options of a run that goes on. Raises ``ValueError`` if it was another run."""
    was = found["options"]
    options = replace(
        options,
        out=options.out or Path(found["out"]),
        global_batch=options.global_batch or was.get("global_batch"),
    )
    for name in KEPT:
        here = getattr(options, name)
        if name in was and was[name] != here:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is {_shown(here)}, but the run in --checkpoint {options.checkpoint} began with "
                f"{_shown(was[name])}; give {flag} {_shown(was[name])}, or an empty folder for another run"
            )
    return options


def write(options: TrainOptions) -> None:
    """Leaves run.json in the checkpoint folder, whole or not at all; ``ValueError`` where it cannot be written."""
    folder, out = options.checkpoint, options.out
    assert folder is not None and out is not None
    about = {"out": str(out.absolute()), "options": {name: asdict(options)[name] for name in (*KEPT, "steps")}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / FILE) as file:
            file.write(json.dumps(about, indent=2) + "\n")
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"--checkpoint: {folder} cannot be written ({why}); give a folder that can") from error


def bring_along(before: Path, out: Path) -> None:
    """Copies the journal of the run's folder up to now into the folder in which it goes on."""
    if before.absolute() == out.absolute():
        return
    for name in (journal.FILE, clock.FILE):
        if (before / name).exists() and not (out / name).exists():
            shutil.copy(before / name, out / name)


def _shown(value: object) -> str:
    return "the default" if value is None else str(value)
