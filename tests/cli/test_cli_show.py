import json
from pathlib import Path

import pytest

from fsdp_compiled.cli import main


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    for run, width in (("a", 8), ("b", 16)):
        dump = tmp_path / run / "dump"
        dump.mkdir(parents=True)
        (dump / "plan.txt").write_text(f"plan of width {width}\n")
        (dump / "00-capture.txt").write_text("captured\nthe same\n")
        (dump / "01-gather.txt").write_text(f"gathered {width}\n")
    return tmp_path / "a", tmp_path / "b"


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_show_prints_the_plan_and_the_last_stage(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", runs[0])
    assert text == "plan of width 8\n\ngathered 8\n"
    assert output(capsys, "show", runs[0] / "dump") == text
    assert "captured" in output(capsys, "show", runs[0], "--stage", "capture")
    (runs[0] / "dump" / "program.txt").write_text("by unit\n")
    assert output(capsys, "show", runs[0]) == "plan of width 8\n\nby unit\n"


def test_diff_of_two_stages(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    dump = runs[0] / "dump"
    text = output(capsys, "diff", dump / "00-capture.txt", dump / "01-gather.txt")
    assert "-captured" in text and "+gathered 8" in text


def test_diff_of_two_runs_compares_what_has_one_name(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (runs[1] / "dump" / "02-reduce.txt").write_text("reduced\n")
    text = output(capsys, "diff", *runs)
    assert "+plan of width 16" in text and "+gathered 16" in text and "captured" not in text
    assert f"Only in {runs[1]}: reduce" in text
    assert "the same plan" in output(capsys, "diff", runs[0], runs[0] / "dump")


def test_what_cannot_be_shown_is_refused(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    for arguments, message in (
        (("show", tmp_path / "bare"), "holds no dump"),
        (("show", tmp_path / "missing"), "holds no dump"),
        (("show", runs[0], "--stage", "nothing"), "has no stage 'nothing'; it has plan, capture, gather"),
        (("diff", runs[0], tmp_path / "missing"), "does not exist"),
        (("diff", runs[0], runs[0] / "dump" / "plan.txt"), "one is a folder and one a file"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        assert message in capsys.readouterr().err


def test_repeated_blocks_are_folded_and_whole_on_demand(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for run, layers in zip(runs, (5, 6), strict=True):
        (run / "dump" / "02-reduce.txt").write_text("".join(f"layers.{n}    reduced\n" for n in range(layers)))
    assert "layers.0..4  reduced  ×5" in output(capsys, "show", runs[0])
    assert "layers.3    reduced\nlayers.4    reduced" in output(capsys, "show", runs[0], "--whole")
    text = output(capsys, "diff", *runs)
    assert "-layers.0..4  reduced  ×5" in text and "+layers.0..5  reduced  ×6" in text
    assert "+layers.5    reduced" in output(capsys, "diff", "--whole", *runs)


def test_diff_says_counts_bytes_and_peak_first(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for run, count in zip(runs, (2, 3), strict=True):
        sent = {"all_gather along shard": {"count": count, "bytes": 1024 * count}}
        figures = {"capture": {"nodes": 9, "collectives": {}, "peak bytes": 2048}}
        figures["gather"] = {"nodes": 9 + count, "collectives": sent, "peak bytes": 4096 * count}
        (run / "dump" / "figures.json").write_text(json.dumps(figures))
    text = output(capsys, "diff", *runs).splitlines()
    assert [line.split() for line in text[:4]] == [
        ["A", "B"],
        ["nodes", "11", "12", "+1"],
        ["all_gather", "along", "shard", "2,", "2.0", "KiB", "3,", "3.0", "KiB", "+1,", "+1.0", "KiB"],
        ["peak", "8.0", "KiB", "12.0", "KiB", "+4.0", "KiB"],
    ]
    dump = runs[0] / "dump"
    text = output(capsys, "diff", dump / "00-capture.txt", dump / "01-gather.txt").splitlines()
    assert text[0].split() == ["00-capture", "01-gather"] and "-captured" in text
    assert "the same plan" in output(capsys, "diff", runs[0], dump)


def test_the_page_is_named_or_missed(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(runs[0]), "--html"]) == 2 and "without a page" in capsys.readouterr().err
    path = runs[0] / "dump" / "report.html"
    path.write_text("")
    assert output(capsys, "show", runs[0], "--html") == f"{path}\n"
