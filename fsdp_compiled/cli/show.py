"""Shows what is on disk: a dump's plan with its final program or a stage, or the difference between two. Also converts
checkpoints.

A *stage* is one numbered text file of a dump folder (`00-capture.txt`); its name is what follows the number. Texts are
folded: what repeats is shown once. ``whole``: texts as they are in the files.
"""

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_compiled.cli import clock
from fsdp_compiled.cli.summary import table
from fsdp_compiled.plan.text import fold
from fsdp_compiled.report.dump import compared

STAGES = "[0-9][0-9]-*.txt"


def add_show_options(show: argparse.ArgumentParser) -> None:
    show.add_argument("run", type=Path, metavar="RUN", help="a run folder, or the folder a dump was written to")
    show.add_argument("--stage", metavar="NAME", help="another stage than the last, for example 'gather'")
    show.add_argument("--whole", action="store_true", help="every line, where repeated blocks are folded otherwise")
    show.add_argument("--html", action="store_true", help="print where the run's page is, report.html, to open offline")


def run_show(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    print(page(chosen.run) if chosen.html else show(chosen.run, chosen.stage, chosen.whole))
    return 0


def add_diff_options(diff: argparse.ArgumentParser) -> None:
    diff.add_argument("a", type=Path, metavar="A", help="a stage's text file, a run folder, or a dump folder")
    diff.add_argument("b", type=Path, metavar="B", help="the same, to compare with A")
    diff.add_argument("--whole", action="store_true", help="of whole texts, where repeated blocks are folded otherwise")


def run_diff(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    print(diff(chosen.a, chosen.b, chosen.whole))
    return 0


def add_convert_options(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("a", type=Path, metavar="A", help="the checkpoint")
    convert.add_argument("b", type=Path, metavar="B", help="where to write it; must not exist")
    convert.add_argument(
        "--to", choices=("ours", "dcp", "hf"), required=True,
        help="ours: for Sharded.load; dcp: for torch.distributed.checkpoint, as {'model': ..., 'optim': ...}; "
        "hf: weights alone, for from_pretrained",
    )  # fmt: skip


def run_convert(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    """Converts, and says what was written, and what the other layout has no place for."""
    from fsdp_compiled.runtime.checkpoint.convert import convert

    found = convert(chosen.a, chosen.b, chosen.to)
    if found.left_out:
        print(f"left out: {', '.join(found.left_out)}")
    print(f"{len(found.parameters)} parameters, {len(found.buffers)} buffers, step {found.manifest.step}: {chosen.b}")
    return 0


def show(run: Path, name: str | None = None, whole: bool = False) -> str:
    """The plan, the final program by unit, and where the run's time went; or one stage instead."""
    spent = clock.read(run) if name is None else None
    time = f"where the time went:\n{table(clock.rows(spent))}" if spent is not None else ""
    if time and not _dumped(run):  # it ended before its first step, or never wrote a dump
        return time
    texts = _texts(_dump(run))
    if name is None:
        name = "program" if "program" in texts else list(texts)[-1]
    if name not in texts:
        raise ValueError(f"{run} has no stage {name!r}; it has {', '.join(texts)}")
    shown = ["\n".join(_lines(texts[part], whole)) for part in dict.fromkeys(("plan", name)) if part in texts]
    return "\n\n".join([*shown, *[time] * bool(time)])


def page(run: Path) -> str:
    """Where the run's `report.html` is."""
    path = _dump(run) / "report.html"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: this dump was written without a page; dump the program again")
    return str(path)


def diff(a: Path, b: Path, whole: bool = False) -> str:
    """The counts of both, and a unified difference: of two files, or of two runs' plans and stages of the same name."""
    for path in (a, b):
        if not path.exists():
            raise ValueError(f"{path} does not exist; give a run folder, a dump folder or a stage's text file")
    if a.is_dir() != b.is_dir():
        raise ValueError(f"{a} and {b}: one is a folder and one a file; give two runs or two stages")
    if a.is_file():
        lines = _diff(a, b, whole)
        return "\n".join([*_counts(a, b), lines]) if lines else f"{a} and {b} are the same"
    left, right = _texts(_dump(a)), _texts(_dump(b))
    parts = _counts(_last(a), _last(b))
    parts += [f"Only in {a}: {name}" for name in left if name not in right]
    parts += [f"Only in {b}: {name}" for name in right if name not in left]
    parts += [text for name in left if name in right and (text := _diff(left[name], right[name], whole))]
    return "\n".join(parts) or f"{a} and {b} have the same plan and the same stages"


def _dumped(run: Path) -> Path | None:
    folders = (folder for folder in (run / "dump", run) if folder.is_dir() and any(folder.glob(STAGES)))
    return next(folders, None)


def _dump(run: Path) -> Path:
    if (folder := _dumped(run)) is not None:
        return folder
    raise ValueError(f"{run} holds no dump (files such as 00-capture.txt); give a run folder or a dump folder")


def _texts(folder: Path) -> dict[str, Path]:
    """What a dump can show, by name: the plan, the final program, and the stages in the order they were made."""
    summaries = {name: path for name in ("plan", "program", "memory") if (path := folder / f"{name}.txt").is_file()}
    return summaries | {path.stem.split("-", 1)[1]: path for path in sorted(folder.glob(STAGES))}


def _diff(a: Path, b: Path, whole: bool) -> str:
    before, after = (_lines(path, whole) for path in (a, b))
    return "\n".join(difflib.unified_diff(before, after, str(a), str(b), lineterm=""))


def _lines(path: Path, whole: bool) -> list[str]:
    lines = path.read_text().rstrip().split("\n")
    return lines if whole else fold(lines)


def _last(run: Path) -> Path:
    return sorted(_dump(run).glob(STAGES))[-1]


def _counts(a: Path, b: Path) -> list[str]:
    """The counts of two stages, if their folders have them and something differs."""
    one, other = (_figures(path) for path in (a, b))
    if one is None or other is None or one == other:
        return []
    names = ("A", "B") if a.name == b.name else (a.stem, b.stem)
    return [*compared(one, other, *names), ""]


def _figures(stage: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((stage.parent / "figures.json").read_text()).get(stage.stem.partition("-")[2])
    except (OSError, ValueError):  # an older dump, or one in which they could not be told
        return None
    return found if isinstance(found, dict) else None
