"""Programs in the log of ``TORCH_TRACE``: every stage of each by our names; where there is none, no text is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = """
import sys
import torch
from torch import nn
from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.report import torch_trace

told = []
attempt = torch_trace.attempt
torch_trace.attempt = lambda make, otherwise: told.append(make) or attempt(make, otherwise)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
sharded = compile_sharded(
    model, torch.optim.AdamW(model.parameters()), loss=lambda model, x: model(x).square().mean(),
    policy=Policy(lower="eager", clip=1.0),
)
print(sharded.step(torch.ones(2, 4)).item(), sharded(torch.ones(2, 4)).sum().item())
print(len(told))
sharded.step(torch.ones(2, 4))
sharded.dump(sys.argv[1])
"""


def ran(folder: Path, **around: str) -> tuple[str, int]:
    """The loss of a step, the sum of results after it, and how many texts were made."""
    given = {name: value for name, value in os.environ.items() if name != "TORCH_TRACE"}
    given |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | around
    command = [sys.executable, "-P", "-c", STEP, str(folder)]
    made = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    losses, told = made.stdout.splitlines()[-2:]
    return losses, int(told)


def artefacts(folder: Path) -> Iterator[tuple[str, str]]:
    """The names and texts of our artefacts in the log."""
    (log,) = folder.iterdir()
    name, lines = "", list[str]()
    for line in [*log.read_text().splitlines(), "V end] {}"]:
        if line.startswith("\t"):
            lines.append(line[1:])
            continue
        if name:
            yield name, "\n".join(lines)
        lines = []
        name = json.loads(line[line.index("] {") + 2 :]).get("artifact", {}).get("name", "")
        name = name if name.startswith("fsdp_compiled_") else ""


def test_each_stage_is_in_the_log_that_tlparse_reads(tmp_path: Path) -> None:
    silent, none = ran(tmp_path / "silent")
    losses, many = ran(tmp_path / "dump", TORCH_TRACE=str(tmp_path / "log"))
    assert losses == silent and none == 0 < many
    found = list(artefacts(tmp_path / "log"))
    assert len(found) == len(dict(found))
    step = {name: text for name, text in found if name.startswith("fsdp_compiled_1_")}
    label, *shown = step.pop("fsdp_compiled_1_program").splitlines()
    assert label == "step (float32[2, 4])" and shown[0].startswith("program: capture -> ")
    assert "forward (float32[2, 4])" in dict(found)["fsdp_compiled_2_program"]
    dumped = {path.name: path.read_text() for path in sorted((tmp_path / "dump").glob("??-*.txt"))}
    names = {f"{name.removeprefix('fsdp_compiled_1_').replace('_', '-', 1)}.txt": name for name in step}
    assert len(names) > 5 and names.keys() <= dumped.keys()
    for file, name in names.items():
        assert step[name] == dumped[file].removesuffix("\n"), name
    assert {*step.values()} == {text.removesuffix("\n") for text in dumped.values()}, "each that changed something"
