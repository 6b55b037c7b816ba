"""A run that may be over sooner without compiling is told, by a count of tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import RESULTS
from bench.start_up import paid
from fsdp_compiled.cli.machine import SHORT, told_short
from fsdp_compiled.cli.options import TrainOptions
from fsdp_compiled.cli.train import Training


@pytest.mark.parametrize(
    ("lower", "device", "tokens", "told"),
    [
        ("inductor", "cpu", SHORT - 1, True),
        ("inductor", "cpu", SHORT, False),
        ("eager", "cpu", 1, False),
        ("inductor", "cuda", 1, False),
    ],
)
def test_few_tokens_are_told_where_cpus_compile(lower: str, device: str, tokens: int, told: bool) -> None:
    text = told_short(lower, device, tokens)
    assert (text is not None) == told
    assert text is None or (f"{tokens:,}" in text and "--lower eager" in text)


def test_the_bound_is_about_what_was_measured() -> None:
    measured = json.loads((RESULTS / "start-up.json").read_text())
    assert paid(measured["seconds"]["now"]) == measured["tokens until compiling has paid"]
    assert 0.6 < SHORT / measured["tokens until compiling has paid"] < 1.6


class _BegunError(Exception):
    """Before the first step is compiled."""


def said(steps: int, done: int) -> list[str]:
    """What a training on CPUs says before it compiles, of 32 windows of 128 bytes a step."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if "capturing" in line:
            raise _BegunError

    training: Any = SimpleNamespace(
        options=TrainOptions(steps=steps, lower="inductor", context=128),
        step=done,
        share=SimpleNamespace(batch=32),
        here=SimpleNamespace(device=torch.device("cpu")),
        progress=SimpleNamespace(say=say),
    )
    with pytest.raises(_BegunError):
        Training.run(training)
    return lines[:-1]


def test_a_job_counts_what_is_left() -> None:
    assert said(300, 0) == []  # the default run
    assert "409,600 tokens are left" in said(100, 0)[0]
    assert "204,800 tokens are left" in said(300, 250)[0]
