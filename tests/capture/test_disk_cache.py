"""Bytes on disk: what was written is read again, and what is damaged or out of reach is missing, never an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_compiled.capture import disk_cache
from tests.modes import changed

CONTENT = bytes(range(256)) * 40


def same(content: bytes) -> bytes:
    return content


def test_what_was_written_is_read_and_nothing_else_lies_there(tmp_path: Path) -> None:
    place = tmp_path / "kept" / "key"
    assert disk_cache.read(place, same) is None
    for content in (CONTENT, b"", CONTENT[::-1]):
        disk_cache.write(place, content)
        assert disk_cache.read(place, same) == content
    assert [file.name for file in place.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "zeroed"])
def test_a_damaged_file_is_missing_and_can_be_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "key"
    disk_cache.write(place, CONTENT)
    whole = place.read_bytes()
    middle = len(whole) // 2
    place.write_bytes(
        {
            "cut": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "emptied": b"",
            "zeroed": whole[:middle] + bytes(len(whole) - middle),
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        assert disk_cache.read(place, same) is None
    assert f"{place} is damaged: it is made anew" in caplog.text
    disk_cache.write(place, CONTENT)
    assert disk_cache.read(place, same) == CONTENT


def test_what_its_reader_cannot_read_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def load(content: bytes) -> None:
        raise EOFError("of another day")

    disk_cache.write(tmp_path / "key", CONTENT)
    assert disk_cache.read(tmp_path / "key", load) is None
    assert "cannot be used (EOFError: of another day): it is made anew" in caplog.text


def test_a_folder_that_cannot_be_written_or_read_is_said_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    disk_cache.write(tmp_path / "file" / "key", CONTENT)
    assert "cannot be written" in caplog.text and "the next start makes it anew" in caplog.text
    (tmp_path / "folder").mkdir()
    assert disk_cache.read(tmp_path / "folder", same) is None
    assert "cannot be read" in caplog.text
    disk_cache.write(tmp_path / "folder", CONTENT)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]


def test_many_may_write_at_once(tmp_path: Path) -> None:
    place = tmp_path / "key"
    contents = [bytes([index]) * 100_000 for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for round_ in [threads.submit(disk_cache.write, place, content) for content in contents * 4]:
            assert disk_cache.read(place, same) in (None, *contents)
            round_.result()
    assert disk_cache.read(place, same) in contents
    assert [file.name for file in tmp_path.iterdir()] == ["key"]


def test_a_folder_is_the_same_one_on_every_host_and_to_all_that_ask_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(disk_cache.identity, [tmp_path / "shared"] * 16))
    monkeypatch.setattr("socket.gethostname", lambda: "another host")
    assert found == {disk_cache.identity(tmp_path / "shared")}
    assert disk_cache.identity(tmp_path / "own") not in found
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["fsdp_compiled_identity"]


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "determinism": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "the default dtype": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
    "functorch": lambda: torch._functorch.config.patch(view_replay_for_aliased_outputs=False),
    "the versions": lambda: mock.patch.object(disk_cache, "versions", lambda: {"torch": "3.0"}),
    "the sources": lambda: mock.patch.object(disk_cache, "versions", lambda: {"sources": "another hash"}),
    "the machine": lambda: mock.patch.object(disk_cache, "_machine", lambda: {"cpu": "another"}),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_a_change_of_a_setting_is_another_key(change: str) -> None:
    before = disk_cache.settings()
    with SETTINGS[change]():
        assert disk_cache.settings() != before
    assert disk_cache.settings() == before
