"""Runs scripts of examples/ twice, with this package's `fully_shard` and with FSDP2's, and notes what rank 0 printed.

examples.py RESULT NAME ...
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

from tests.launch import answer

EXAMPLES = Path(__file__).parents[2] / "examples"
IMPORT = re.compile(r"^from fsdp_compiled import fully_shard$", re.MULTILINE)


def source(name: str, face: str) -> str:
    """The script, or the same with its one import exchanged; ``broken``: as the script, with another rate."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(IMPORT.findall(text)) == 1 and text.count("fsdp_compiled") == 1, f"{name} does not have one import"
    if face == "FSDP2":
        return IMPORT.sub("from torch.distributed.fsdp import fully_shard", text)
    return text.replace("lr=", "lr=1.01 * ") if face == "broken" else text


def run(name: str, face: str) -> list[str]:
    """The lines that a script printed. It finds the process group there, and leaves it."""
    path = str(EXAMPLES / f"{name}.py")
    module = types.ModuleType("__main__")
    module.__file__ = path
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    start, end = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # type: ignore[assignment]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source(name, face), path, "exec", dont_inherit=True), vars(module))
    finally:
        sys.modules["__main__"] = before
        dist.init_process_group, dist.destroy_process_group = start, end
    return printed.getvalue().splitlines()


def main(*names: str) -> dict[str, list[str]]:
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    found = {}
    for name in names:
        name, _, broken = name.partition(":")
        faces = (broken,) if broken else ("ours", "FSDP2")
        found |= {f"{name} {face}": run(name, face) for face in faces}
    return found


if __name__ == "__main__":
    answer(main)
