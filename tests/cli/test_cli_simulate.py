"""`fsdp-compiled simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_compiled.cli import main

SETUP = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

def loss(model, x):
    return model(x).square().mean()

def setup():
    return mlp, loss, (torch.empty(4, 8),)

def wrong():
    return mlp
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_to_simulate.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_of_ones_own_on_ranks_that_are_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --setup mine_to_simulate:setup --ranks 16 --replicate 2 --tp 4 --json figures.json --program"
    assert main([*command.split(), "--network-gbps", "100", "--inner-gbps", "1000"]) == 0
    said = capsys.readouterr().out
    for part in (
        "simulated: 16 ranks (replicate 2, shard 2, tp 4), gpu", "a step: ", "along tp", "peak: ",
        "zero3 on 2 ranks x 2 replicas x 4 tensor-parallel", "a plan derived from Sequential and tried: *: colwise",
        "reduce_scatter",
    ):  # fmt: skip
        assert part.replace("*", "0") in said, said
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["seconds"] >= figures["exposed seconds"] > 0 and figures["bytes at the peak"] > 0
    assert set(figures["sent"]) == {"shard", "replicate", "tp"} and figures["busy seconds"]["tp"] > 0


def test_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 2 --width 8 --heads 2 --context 4 --batch 1"
    assert main(f"simulate --preset thin {sizes} --ranks 4 --hardware cpu --shard zero2 --half".split()) == 0
    said = capsys.readouterr().out
    assert "simulated: 4 ranks (shard 4), cpu" in said and "zero2 on 4 ranks" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--ranks 6 --tp 4", "--ranks 6 are no whole number of --replicate 1 times --tp 4"),
        ("--inner-gbps 5", "--inner-gbps is the wire along tp"),
        ("--network-gbps 5 --node 2", "--network-gbps is what each rank has for itself"),
        ("--network-gbps 5 --nic 400Gb/s", "--network-gbps is what each rank has for itself"),
        ("--setup mine_to_simulate:setup --layers 3", "--layers is of a preset's model"),
        ("--setup mine_to_simulate", "expected MODULE:FUNCTION"),
        ("--setup mine_to_simulate:nothing", "has no attribute 'nothing'"),
        ("--setup mine_to_simulate:wrong", "returned function; expected (model_fn, loss, batch)"),
    ],
)
def test_what_is_refused(options: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *options.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("place", "why"), [("nowhere/f.json", "would be in nowhere, which is no folder"), (".", "is a folder")]
)
def test_where_it_cannot_be_written_is_said_at_once(
    command: str, place: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--json", place])
    assert why in capsys.readouterr().err
