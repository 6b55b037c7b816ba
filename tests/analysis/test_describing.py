"""What describes a program never stops it: predictions, estimates and texts that fail say so in their own place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.analysis import memory, peak_memory, roofline, timeline
from fsdp_compiled.cli import summary
from fsdp_compiled.cli.journal import Record
from fsdp_compiled.ir import text
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.report import dump

Loss = Callable[..., torch.Tensor]


def trained(loss: Loss, *batch: torch.Tensor, **policy: Any) -> Sharded:
    """Three steps, which are eager PyTorch's."""
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    policy = {"lower": "eager"} | policy
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=Policy(**policy))
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(plain, *batch)
        value.backward()
        optimizer.step()
        torch.testing.assert_close(sharded.step(*batch), value.detach(), rtol=1e-5, atol=1e-6)
    return sharded


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def fail(*_args: Any, **_named: Any) -> Any:
    raise IndexError("nobody thought of this one")


DESCRIPTIONS: list[tuple[Any, str, str]] = [
    (memory, "persistent", "memory.txt"),
    (peak_memory, "predict", "memory.txt"),
    (memory.Memory, "lines", "memory.txt"),
    (memory.Memory, "text", "memory.txt"),
    (roofline, "flops", ""),
    (timeline.Timeline, "text", "timeline.txt"),
    (dump, "estimate", "timeline.txt"),
    (dump, "summary", "program.txt"),
    (text, "summary", ""),
    (dump, "difference", "01-gather.diff"),
    (dump, "describe", "plan.txt"),
    (dump, "predict", ""),
    (dump, "counts", "figures.json"),
    (dump, "figures", "report.html"),
    (Plan, "__str__", "report.html"),
]


@pytest.mark.parametrize(("owner", "name", "file"), DESCRIPTIONS)
def test_a_description_that_fails_stops_nothing(
    owner: Any, name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fail)
    sharded = trained(plain, torch.randn(3, 4))
    assert str(sharded.program)
    folder = sharded.dump(tmp_path / "dump")
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"plan.txt", "00-capture.txt", "program.txt", "timeline.txt", "memory.txt"} <= written.keys()
    told = {name for name, content in written.items() if "nobody thought of this one" in content}
    assert not file or file in told
    assert "00-capture.txt" not in told


def test_memory_that_is_not_predicted_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peak_memory, "predict", fail)
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        sharded = trained(plain, torch.randn(3, 4), memory_gb=0.001)
    assert "memory_gb=0.001 has no effect: memory is not predicted: IndexError: nobody" in caplog.text
    assert "not predicted: IndexError: nobody thought of this one (test_describing.py, line" in str(sharded.memory)
    assert "peak: not predicted" in str(sharded.program) and "memory_gb=0.001 has no effect" in str(sharded.program)
    with pytest.raises(ValueError, match="not predicted: IndexError"):
        _ = sharded.memory.peak


def attention(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = model(x).view(1, 2, 3, 4)
    return F.scaled_dot_product_attention(h, h, h).square().sum()


def nothing_in_it(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + model(x[:0]).sum()


def without_a_batch(model: nn.Linear) -> torch.Tensor:
    return model.weight.square().sum() + model.bias.sum()


def complex_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(model(x)).abs().mean()


def chosen_by_the_data(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)[x[:, 0] > 0].square().sum()


ODD: list[tuple[Loss, dict[str, Any], bool]] = [
    (attention, {}, True),
    (nothing_in_it, {}, True),
    (without_a_batch, {}, False),
    (complex_inside, {}, True),
    (chosen_by_the_data, {}, True),
    (chosen_by_the_data, {"lower": "inductor"}, True),
    (plain, {"dynamic": True}, True),
]


@pytest.mark.parametrize(("loss", "policy", "batched"), ODD)
def test_odd_programs_run_and_are_described(loss: Loss, policy: dict[str, Any], batched: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sharded = trained(loss, *[torch.randn(6, 4)] * batched, **policy)
    assert "peak: " in str(sharded.memory) and "not predicted" not in str(sharded.memory)
    for path in sharded.dump(tmp_path / "dump").iterdir():
        assert "could not be told" not in path.read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sharded = trained(plain, torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"dump cannot write to .*file/dump: Not a directory"):
        sharded.dump(tmp_path / "file" / "dump")
    assert sharded.step(torch.randn(3, 4)).isfinite()


def test_a_plot_that_cannot_be_drawn_loses_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary, "smooth", fail)
    records = [Record(1, 2.0, 2.0, 1.0, 1e-3, 10.0, 1, 1.0)]
    assert not summary.curve(records, 3.0, tmp_path / "loss.png")
    assert "no loss.png in this run: " in capsys.readouterr().out


def test_a_prompt_shows_what_print_shows() -> None:
    sharded = trained(plain, torch.randn(2, 4))
    for value in (sharded.plan, sharded.program, sharded.memory):
        assert repr(value) == str(value) != ""
    assert repr(sharded.program).startswith("program: capture -> gather")
