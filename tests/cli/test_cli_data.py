import math
from pathlib import Path

import pytest
import torch

from fsdp_compiled.cli.data import (
    IGNORED,
    Corpus,
    Windows,
    held_out_windows,
    load_corpus,
    rank_batches,
    train_windows,
    unigram_loss,
)


def folder(root: Path, files: int, size: int = 400) -> Path:
    for index in range(files):
        (root / f"{index:02}.txt").write_bytes(bytes([65 + index]) * size)
    return root


def corpus(train: int, held_out: int) -> Corpus:
    return Corpus(torch.zeros(train, dtype=torch.uint8), torch.zeros(held_out, dtype=torch.uint8), "a test", 1, 0)


def test_windows_tile_the_text_and_targets_are_one_further() -> None:
    windows = Windows(torch.arange(11, dtype=torch.uint8), context=5)
    assert len(windows) == 2
    tokens, targets = windows[1]
    assert tokens.tolist() == [5, 6, 7, 8, 9] and targets.tolist() == [6, 7, 8, 9, 10]
    assert tokens.dtype == torch.long
    assert len(Windows(torch.arange(10, dtype=torch.uint8), context=5)) == 1  # the last target is missing


def test_many_files_are_held_out_whole(tmp_path: Path) -> None:
    found = load_corpus(folder(tmp_path, files=20))
    held_out = set(found.held_out.tolist())
    assert held_out == {65 + 9, 65 + 19} and not held_out & set(found.train.tolist())
    assert (found.train.numel(), found.held_out.numel(), found.files) == (18 * 400, 2 * 400, 20)


def test_of_few_files_the_tail_is_held_out(tmp_path: Path) -> None:
    text = bytes(range(1, 201))
    (tmp_path / "one").write_bytes(text)
    found = load_corpus(tmp_path / "one")
    assert bytes(found.train.tolist()) + bytes(found.held_out.tolist()) == text
    assert found.held_out.numel() == 20


def test_order_does_not_depend_on_the_file_system(tmp_path: Path) -> None:
    for name in ("b", "a/z", "a/c", ".hidden/x", "__pycache__/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 10)
    found = load_corpus(tmp_path)
    assert bytes(torch.cat((found.train, found.held_out)).tolist()).decode() == "a/c" * 10 + "a/z" * 10 + "b" * 10


def test_files_that_are_not_text_are_skipped_and_counted(tmp_path: Path) -> None:
    folder(tmp_path, files=2)
    (tmp_path / "binary").write_bytes(b"\0" * 400)
    found = load_corpus(tmp_path)
    assert (found.files, found.skipped) == (2, 1) and "1 not text" in str(found)


def test_the_standard_library_is_text_enough() -> None:
    found = load_corpus(None)
    assert found.train.numel() > 1_000_000 and found.held_out.numel() > 100_000


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_corpus(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no text .* no files"):
        load_corpus(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no text"):
        load_corpus(tmp_path / "empty")


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    folder(tmp_path, files=1)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*00\.txt: Permission denied"):
        load_corpus(tmp_path)


def test_too_little_text_is_refused_with_the_numbers() -> None:
    assert len(train_windows(corpus(81, 0), context=10, batch=8)) == 8
    with pytest.raises(ValueError, match=r"7 training windows .* takes 8"):
        train_windows(corpus(80, 0), context=10, batch=8)
    with pytest.raises(ValueError, match=r"10 bytes held out, and validation needs at least 11"):
        held_out_windows(corpus(80, 10), context=10, count=4)


def test_held_out_windows_spread_over_the_text() -> None:
    text = torch.arange(101, dtype=torch.uint8)
    tokens, targets = held_out_windows(Corpus(text, text, "", 1, 0), context=10, count=5)
    assert tokens[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert targets.tolist() == (tokens + 1).tolist()
    assert held_out_windows(Corpus(text, text, "", 1, 0), context=10, count=50)[0].shape == (10, 10)


@pytest.mark.parametrize("rows", [1, 7, 8, 9])
def test_validation_counts_each_window_once_whatever_the_world(rows: int) -> None:
    tokens = torch.arange(rows * 3).reshape(rows, 3)
    per_rank = [rank_batches(tokens, tokens + 1, batch=2, rank=rank, world=2) for rank in range(2)]
    assert len(per_rank[0]) == len(per_rank[1])
    batches = per_rank[0] + per_rank[1]
    assert all(x.shape == y.shape == (2, 3) for x, y in batches)
    counted = [target for _, y in batches for target in y.flatten().tolist() if target != IGNORED]
    assert sorted(counted) == list(range(1, rows * 3 + 1))


def test_unigram_loss_is_the_hand_computation() -> None:
    train = torch.tensor([1, 1, 1, 2], dtype=torch.uint8)
    targets = torch.tensor([[1, 2], [1, 9]])
    # add-one: 256 bytes that occur once more than they do
    expected = -(2 * math.log(4 / 260) + math.log(2 / 260) + math.log(1 / 260)) / 4
    assert unigram_loss(train, targets) == pytest.approx(expected, rel=1e-12)
