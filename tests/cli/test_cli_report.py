import json
import logging
from pathlib import Path

import pytest
import torch

from fsdp_compiled.capture.disk_cache import whole_file
from fsdp_compiled.cli.journal import Compiling, Journal, Progress, Record, seconds_left
from fsdp_compiled.cli.summary import curve, printable, smooth, table


def record(step: int, val_loss: float | None = None) -> Record:
    return Record(step, 5.0 - step, val_loss, 1.0, 1e-3, 100.0, 2**30, float(step))


def test_save_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with whole_file(path, "wb") as file:
        torch.save({"weight": torch.ones(3)}, file)
    with pytest.raises(OSError, match="disk full"), whole_file(path, "wb") as file:
        file.write(b"half")
        raise OSError("disk full")
    assert [found.name for found in tmp_path.iterdir()] == ["model.pt"]
    assert torch.load(path)["weight"].tolist() == [1, 1, 1]


def test_metrics_are_on_disk_as_soon_as_they_are_known(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    journal = Journal(tmp_path)
    journal.add(record(1))
    journal.add(record(2, val_loss=2.5))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    journal.close()
    assert [line["step"] for line in lines] == [1, 2]
    assert "val_loss" not in lines[0] and lines[1]["val_loss"] == 2.5
    assert (journal.val_loss, journal.train_loss) == (2.5, 3.5)
    assert any((tmp_path / "tensorboard").iterdir())


def test_smoothing_starts_at_the_first_loss() -> None:
    assert smooth([]) == []
    assert smooth([3.0] * 200) == pytest.approx([3.0] * 200)
    assert smooth([8.0] + [2.0] * 199)[0] == pytest.approx(8.0)


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert curve([record(1), record(2, 2.9), record(3)], 3.3, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_lines_up() -> None:
    lines = table([("a", "1"), ("longer", "22")]).splitlines()
    assert lines[1:-1] == [" a        1 ", " longer  22 "] and len({len(line) for line in lines}) == 1


def test_progress_prints_ends_and_validations(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(steps=9, tokens=50)
    for step in range(1, 10):
        progress.update(record(step, 2.5 if step == 4 else None))
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/9", "4/9", "9/9"]


def test_time_left_needs_a_speed() -> None:
    assert seconds_left(record(4), steps=10, tokens=50) == 3.0


def test_a_sample_cannot_drive_the_terminal() -> None:
    assert printable("def\n\tx\x1b[2J\r\x00é") == "def\n\tx\ufffd[2J\ufffd\ufffdé"


def test_the_compilers_progress_is_said_once_a_second_and_warnings_are_as_they_were(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("fsdp_compiled")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    monkeypatch.setattr(log, "handlers", [])  # that another test left
    before = log.level, list(log.handlers)
    with Compiling(Progress(3, 10)):
        for piece in (1, 2):
            log.info("compiling %d of %d pieces (%d operators)", piece, 12, 40)
        log.info("something else")
        log.warning("look here")
    log.info("compiling %d of %d pieces", 3, 12)
    assert (log.level, log.handlers) == before
    said = capsys.readouterr()
    assert said.out == "compiling 1 of 12 pieces (40 operators)\n"
    assert said.err == "look here\n"
