"""`train` goes on where it was killed or stopped, on as many ranks or others, as if nothing had happened."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fsdp_compiled.cli import resume
from fsdp_compiled.cli.launch import resolve
from fsdp_compiled.cli.options import TrainOptions
from tests.chosen import chosen, examples, selected
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "resuming.py"


@pytest.fixture(scope="module")
def answer(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(WORKER, 1, *selected(request, "world", "answer"), alone=True)


def test_all_ranks_stop_after_the_same_step_when_one_is_asked_to(answer: dict[str, Any]) -> None:
    assert answer["preempted"]["codes"] == [143, 143]
    assert answer["after"] == [3, 6] and "stopped after step 6" in answer["preempted"]["said"][0]


def test_a_run_that_was_stopped_and_killed_ends_as_one_that_was_not(answer: dict[str, Any]) -> None:
    assert answer["killed"][-1] == "renamed" and len(answer["killed"]) == examples(1, 4)
    assert answer["equal"] == dict.fromkeys(("journal", "weights", "sample", "summary"), True)


@pytest.mark.parametrize("world", chosen(["1", "4"], ["1"]))
def test_other_numbers_of_ranks_take_the_same_windows_and_have_the_same_losses(
    answer: dict[str, Any], world: str
) -> None:
    elsewhere = answer["elsewhere"][world]
    assert set(elsewhere["codes"]) == {0} and "goes on after step 3" in elsewhere["said"][0]
    assert len(elsewhere["journal"]) == len(answer["journal"]) == 24
    for here, there in zip(elsewhere["journal"], answer["journal"], strict=True):
        step, loss, norm, lr = here
        assert step == there[0] and lr == there[3]
        assert math.isclose(loss, there[1], rel_tol=1e-5) and math.isclose(norm, there[2], rel_tol=1e-3)
    later = [(here, there) for here, there in zip(elsewhere["journal"], answer["journal"]) if here[0] > 3]
    assert any(here[1] != there[1] for here, there in later), "the control: it was another program that made these"


def test_where_the_time_went_is_shown_later(answer: dict[str, Any]) -> None:
    # Not the one that was killed while it loaded, before it could write: its time is between attempts.
    # Where a step was killed right after a save, none was made twice.
    for part in (f"goodput, of {examples(3, 5)} attempts", "between attempts", "compiling"):
        assert part in answer["shown"]


def test_a_loss_that_is_no_number_is_skipped_or_stops_and_its_rank_is_named(answer: dict[str, Any]) -> None:
    skip, stop = answer["skip"], answer["stop"]
    assert skip["codes"] == [0, 0] and skip["result"]["skipped_steps"] == 1
    assert "the loss is nan at step 5: it is not finite on rank 1 (nan); nothing was updated" in skip["said"][0]
    assert math.isfinite(skip["result"]["validation_loss"])
    assert stop["codes"] == [2] and stop["result"] is None
    assert "the loss is nan at step 5: it is not finite on rank 0 (nan); try a smaller --lr" in stop["said"][0]


def options(folder: Path, **more: Any) -> TrainOptions:
    return TrainOptions(lower="eager", nproc=2, checkpoint=folder / "saved", **more)


def test_the_same_command_goes_on_in_the_run_folder_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = resolve(options(tmp_path))
    assert first.out is not None and first.global_batch == 32
    (first.out / "metrics.jsonl").write_text('{"step": 1}\n')
    again = resolve(options(tmp_path), world=8)
    assert again.out == first.out.absolute() and again.global_batch == 32  # on any number of ranks
    with pytest.raises(ValueError, match="already holds a run"):
        resolve(TrainOptions(lower="eager", nproc=2, out=first.out))
    moved = resolve(options(tmp_path, out=tmp_path / "moved", steps=400))
    assert (tmp_path / "moved" / "metrics.jsonl").read_text() == '{"step": 1}\n' and moved.out == tmp_path / "moved"
    assert "--steps 400 instead of 300" in capsys.readouterr().out
    assert resolve(options(tmp_path)).out == tmp_path / "moved"


@pytest.mark.parametrize("other", [{"lr": 0.1}, {"width": 64}, {"seed": 1}, {"warmup": 3}, {"global_batch": 8}])
def test_a_run_does_not_go_on_with_other_numbers_than_it_began_with(tmp_path: Path, other: dict[str, Any]) -> None:
    resolve(options(tmp_path, out=tmp_path / "run"))
    before = (tmp_path / "saved" / resume.FILE).read_text()
    (name, value), *_ = other.items()
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {value}, but the run .* began with"):
        resolve(options(tmp_path, **other))
    assert (tmp_path / "saved" / resume.FILE).read_text() == before


def test_a_checkpoint_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("a file")
    with pytest.raises(ValueError, match=r"--checkpoint: .* cannot be"):
        resolve(options(tmp_path, out=tmp_path / "run"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / resume.FILE).write_text("{}")
    with pytest.raises(ValueError, match="not what train writes"):
        resolve(TrainOptions(lower="eager", nproc=2, checkpoint=tmp_path / "other"))
