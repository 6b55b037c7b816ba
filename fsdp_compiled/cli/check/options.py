"""The options of `check`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from fsdp_compiled.cli.options import whole

RESULT = "check.json"


@dataclass(frozen=True)
class CheckOptions:
    """``nproc``: ranks of the tests between ranks; None: all GPUs, or two. ``out``: the folder for the file."""

    nproc: int | None
    out: Path | None


def add_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=whole, metavar="N", help="ranks of the tests between ranks (all GPUs, else 2)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write {RESULT}, to send with a report, there")
