"""The whole job, through real processes and the real compiler."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import launch

ROOT = Path(__file__).parents[2]
TINY = "--nproc=2 --layers=2 --width=16 --heads=2 --context=16 --batch=2 --lower=eager"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {number} of the text, which says little\n" for number in range(2000)))
    return path


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of three steps from a seed, on ranks that join those of torchrun, as it were, and what its
    first rank printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    options = ["--data", str(text), "--out", str(out), "--steps", "3", "--seed", "7", "--profile"]
    (status, printed), (other, _) = launch(ROOT / "tests" / "workers" / "cli.py", 2, "train", *TINY.split(), *options)
    assert status == other == 0, printed
    return out, str(printed)


def start(text: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "fsdp_compiled",
        "train",
        *TINY.split(),
        "--data",
        str(text),
        "--out",
        str(out),
        *more,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_in_the_folder_it_names_last(whole: tuple[Path, str]) -> None:
    out, printed = whole
    assert printed.splitlines()[-1] == str(out)
    assert "byte-unigram model's validation loss" in printed
    wrote = {path.name for path in out.iterdir()}
    assert {"config.json", "metrics.jsonl", "model.pt", "sample.txt", "dump"} <= wrote
    assert "profile: The step is bound by " in printed and "(1 step measured; predicted: " in printed  # the third
    events = json.loads((out / "dump" / "trace.json").read_text())["traceEvents"]
    assert {one["args"]["name"] for one in events if one["name"] == "process_name"} == {"predicted", "measured"}
    assert '"measured seconds":0.' in (out / "dump" / "report.html").read_text()
    steps = metrics(out)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["val_loss"]) for step in steps)
    assert json.loads((out / "config.json").read_text())["options"]["steps"] == 3
    weights = torch.load(out / "model.pt")
    assert weights["layers.1.up.weight"].shape == (64, 16) and weights["embed.weight"].shape == (256, 16)


def test_an_interrupted_run_saves_what_it_reached(text: Path, whole: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(text, out, "--steps", "100000", "--seed", "7")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step      1/"):
            process.send_signal(signal.SIGINT)
            break
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert printed.splitlines()[-1] == str(out)
    assert "stopped after step" in printed
    assert 1 <= len(metrics(out)) < 100000
    assert metrics(out)[0]["loss"] == metrics(whole[0])[0]["loss"]  # the launcher's ranks, and ranks that joined
    assert "embed.weight" in torch.load(out / "model.pt") and any((out / "logs").iterdir())
