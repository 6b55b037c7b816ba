"""`fsdp-compiled train` on ranks of torchrun's: what rank 0 refuses, every rank says and ends with; none waits."""

from __future__ import annotations

from pathlib import Path

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "cli.py"


def test_a_folder_that_cannot_be_written_is_said_by_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    first, second = launch(WORKER, 2, "train", "--lower", "eager", "--out", str(tmp_path / "file" / "run"))
    for status, said in (first, second):
        assert status != 0
        assert "fsdp-compiled train: error:" in said and "cannot be written (Not a directory)" in said
        assert "Traceback" not in said
    assert "rank 0 failed" in second[1] and "rank 0 failed" not in first[1]


def test_ranks_with_other_orders_of_the_data_are_refused_on_every_rank(tmp_path: Path) -> None:
    tiny = ("--layers=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--steps=1", "--lower=eager")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a line.\n" for number in range(2000)))
    given = ("train", *tiny, "--data", str(text), "--out", str(tmp_path / "run"))
    for status, said in launch(WORKER, 2, *given, "--seed", "{rank}"):
        assert status != 0
        assert "ranks have other text, or were given another --seed" in said, said
