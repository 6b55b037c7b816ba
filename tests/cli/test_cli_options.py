from pathlib import Path

import pytest

from fsdp_compiled.cli import main
from fsdp_compiled.cli.launch import resolve
from fsdp_compiled.cli.options import TrainOptions


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--steps 0", "--steps: expected a whole number from 1, got 0"),
        ("--steps many", "--steps: invalid whole value"),
        ("--lr 0", "--lr: expected a number above 0"),
        ("--clip -1", "--clip: expected a number from 0"),
        ("--shard zero4", "--shard: invalid choice"),
        ("--lower triton", "--lower: invalid choice"),
    ],
)
def test_an_option_is_refused_by_name(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", *arguments.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("fsdp-compiled train: error: ") and message.count("\n") == 1
    return message


def test_heads_must_divide_the_width(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "try --width 102" in refusal("--width 100 --heads 3", capsys)
    assert list(alone.iterdir()) == []


def test_a_profile_needs_steps_to_measure(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--profile", "--steps", "2", "--out", str(alone / "run")]) == 2
    assert "--profile measures from the third step on, and --steps is 2" in capsys.readouterr().err


def test_a_prompt_must_not_be_empty(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--prompt", "", "--out", str(alone / "run")]) == 2
    assert "--prompt is empty" in capsys.readouterr().err
    assert list(alone.iterdir()) == []


def test_data_must_exist_before_anything_starts(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere does not exist" in refusal("--data nowhere --out run", capsys)
    assert list(alone.iterdir()) == []


def test_a_folder_with_a_run_is_left_alone(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alone / "run").mkdir()
    (alone / "run" / "metrics.jsonl").write_text("{}")
    assert "run already holds a run" in refusal("--out run", capsys)
    assert [path.name for path in (alone / "run").iterdir()] == ["metrics.jsonl"]
    assert "run/metrics.jsonl is a file" in refusal("--out run/metrics.jsonl", capsys)


def test_what_was_left_open_is_made(alone: Path) -> None:
    (alone / "kept").mkdir()
    (alone / "kept" / "notes.txt").touch()
    made = resolve(TrainOptions(out=alone / "kept", nproc=1, lower="eager"))
    assert (made.out, made.nproc, made.lower) == (alone / "kept", 1, "eager")
    made = resolve(TrainOptions())
    assert made.out is not None and made.out.parent == Path("runs")
    assert made.lower in ("eager", "inductor") and made.nproc is not None


def test_help_shows_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert all(
        option in text for option in "--nproc --steps --out --seed --lower --shard --data --warmup --clip".split()
    )
