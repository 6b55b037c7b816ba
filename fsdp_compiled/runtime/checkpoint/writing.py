"""The saves of one `Sharded`: from the copied state to a complete checkpoint, in the background.

    each rank     writes its files, posts what is in them (or why it could not)  ...........  hears how it ended
    rank 0                            hears all, writes the manifest, renames, removes old ones, posts the end

There is no collective in the background, and no process group. Ranks post on the store, where calls are posted too. So
every rank has the same outcome: the checkpoint's folder, or the same error. After an error the aside folder is removed,
and earlier checkpoints are as they were.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from fsdp_compiled.distributed import watchdog
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.call_store import Board, Row
from fsdp_compiled.distributed.mesh import Mesh, lockstep
from fsdp_compiled.runtime.checkpoint import data_file, folder, manifest
from fsdp_compiled.runtime.checkpoint.chunks import Entry, Piece
from fsdp_compiled.runtime.checkpoint.contents import Trained
from fsdp_compiled.runtime.checkpoint.manifest import DataFile, Manifest
from fsdp_compiled.runtime.checkpoint.saving import Image, Plans, Save, Wish, Written, prepare
from fsdp_compiled.runtime.state import wait_for_host_memory

Busy = Literal["wait", "refuse", "double_buffer"]
SILENCE = 600.0  # seconds after which a rank that writes and says nothing is given up
POLL = 0.01  # seconds between two reads of the store, at first; then a tenth of the time waited so far
LOOK = 0.5  # seconds between two looks at whether another rank's process lives
FAILED = 10.0  # seconds of its silence that are enough once ranks have failed


class SaveError(RuntimeError):
    """A checkpoint was not written, or not surely; raised on every rank. Earlier checkpoints are there."""


class Saving(Future[Path]):
    """The future that `Sharded.save` returns: ``result()`` is the folder, once the checkpoint is complete."""

    def __init__(self, save: Save) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # or it could be cancelled, and its memory reused while it is written
        self.save = save
        self.told = False  # whether somebody was given its error

    def result(self, timeout: float | None = None) -> Path:
        """The checkpoint's folder. Waits for it; raises `SaveError`, the same on every rank."""
        try:
            return super().result(timeout)
        except SaveError:
            self.told = True
            raise

    def failed(self) -> SaveError | None:
        """Its error, if it ended with one and nobody was told."""
        if self.told or not self.done():
            return None
        error = super().exception()
        return error if isinstance(error, SaveError) else None


Copied = Sequence[memoryview] | Exception  # by file, its bytes; or why there are none


class Checkpoints:
    """The checkpoints of one `Sharded`: one is being written at a time, and at most one more waits to be."""

    def __init__(self, mesh: Mesh, calls: Calls) -> None:
        self._mesh, self._calls = mesh, calls
        self._images = [Image(mesh.device)]  # a second one where `busy` was "double_buffer"
        self._plans = Plans()
        self._open: list[tuple[Saving, Image]] = []  # saves that run, or whose failure nobody was told
        self._count = 0

    def check(self) -> None:
        """Raises `SaveError`, once, if a checkpoint could not be written in the background."""
        for one, _ in self._open:
            if (error := one.failed()) is not None:
                one.told = True
                raise error

    def heard(self, text: str) -> None:
        """Notes that this rank heard what other ranks said. If it was this error, nobody needs to hear it again."""
        for one, _ in self._open:
            if one.save.what in text:
                one.told = True

    def wait(self, busy: Busy = "wait", place: Path | None = None, step: int | None = None) -> None:
        """Waits until no checkpoint is being written, but for one earlier than this one under ``"double_buffer"``.

        Raises `SaveError` for a save that failed and nobody was told of; under ``"refuse"``, ``ValueError`` while one
        is being written.
        """
        for one, _ in list(self._open):
            save = one.save
            if busy == "refuse" and not one.done():
                raise ValueError(f"{save.what} is still being written.")
            before = save.aside.parent != place or step is None or save.head.step < step
            if busy == "double_buffer" and before and len(self._open) == 1 and not one.done():
                return
            told = one.told
            try:
                one.result()
            except SaveError:
                if not told:
                    raise
            self._open.pop(0)

    def save(self, wish: Wish, trained: Trained, extra: Mapping[str, Any]) -> Saving:
        """Saves a checkpoint. Collective, up to the copy. All ranks have agreed that they save."""
        wait_for_host_memory(trained.plan)
        begun: list[Path] = []
        self._count += 1
        work = prepare(wish, self._count, self._mesh, trained, extra, self._plans, begun)
        try:
            save, own = lockstep(self._mesh, "What save writes", work)
        except BaseException:
            for aside in begun:
                folder.abandon(aside)
            raise
        finally:
            work.close()
        image = self._free_image()
        copied: Copied | None = None
        try:
            copied = image.fill(own.files, own.beside)
        except Exception as error:
            copied = error
        finally:  # if this rank was interrupted, the others hear of that too
            if copied is None:
                copied = RuntimeError("it was interrupted while it copied")
            after = self._open[-1][0] if self._open else None
            future, board = Saving(save), self._calls.board or Board(dist.HashStore(), 0, 1)  # one rank posts to itself
            self._open.append((future, image))
            given = save, own, copied, self._mesh.rank, board, future, after
            name = f"checkpoint of step {save.head.step}"
            threading.Thread(target=_run, args=given, name=name, daemon=False).start()
        return future

    def _free_image(self) -> Image:
        """An image that is not being written."""
        used = [image for _, image in self._open]
        if all(one in used for one in self._images):
            self._images.append(Image(self._mesh.device))
        return next(one for one in self._images if one not in used)


def _run(
    save: Save, own: Written, copied: Copied, rank: int, board: Board, future: Saving, after: Saving | None
) -> None:
    """Runs in a thread that Python waits for at its end. It first waits for ``after``, if one is given."""
    try:
        beat = Heartbeat(board, save.key(f"alive {rank}"))
        while after is not None and not wait([after], LOOK).done:  # nobody is told how it ended
            beat()
        after = None  # otherwise each would hold the one before
        said = _write(save, own, copied, rank, beat)
        board.set(save.key(f"part {rank}"), said)
        end = _finish(save, board) if rank == 0 else _hear(save, board)
        board.set(save.key(f"heard {rank}"), "")
        if rank == 0:
            _linger(save, board)
    except BaseException as error:  # the store is gone, with the rank that holds it
        end = _read_end(save, f"{type(error).__name__}: {error}")
    if rank == 0:
        folder.end(save.aside)
    if end == "":
        future.set_result(folder.path_of(save.aside.parent, save.head.step))
    else:
        future.set_exception(SaveError(end))


def _write(save: Save, own: Written, copied: Copied, rank: int, beat: Heartbeat) -> str:
    """This rank's message: its part of the manifest, or why there is none."""
    try:
        if isinstance(copied, Exception):
            raise copied
        checksums = [
            data_file.write(save.aside / file.name, [image], beat)
            for file, image in zip(own.files, copied, strict=True)
        ]
    except Exception as error:
        return json.dumps({"error": _in_words(error, rank, save)})
    return json.dumps(manifest.content_of(part_of(save, own, rank, checksums)))


def _in_words(error: Exception, rank: int, save: Save) -> str:
    if isinstance(error, OSError):
        return f"rank {rank}: {error.strerror or error} ({error.filename or save.aside})"
    return f"rank {rank}: {type(error).__name__}: {error}"


def part_of(save: Save, own: Written, rank: int, checksums: Sequence[Sequence[str]]) -> Manifest:
    """What this rank has written; rank 0's part lists the tensors that there have to be."""
    part = replace(save.head, tensors={**save.head.tensors} if rank == 0 else {}, values=dict(own.values), files={})
    for file, found in zip(own.files, checksums, strict=True):
        part.files[file.name] = DataFile(file.name, file.layout.size, found)
        for start, one in file.places([*file.shards, *own.beside]):
            piece = Piece(one.offsets, tuple(one.values.shape), file.name, start)
            before = part.tensors[one.name].pieces if one.name in part.tensors else []
            part.tensors[one.name] = Entry(one.shape, one.values.dtype, [*before, piece])
    return part


class Heartbeat:
    """Says from time to time that this rank is still writing."""

    def __init__(self, board: Board, key: str) -> None:
        self._board, self._key = board, key
        self._last, self._count = time.monotonic(), 0

    def __call__(self) -> None:
        if time.monotonic() - self._last > 1:
            self._last, self._count = time.monotonic(), self._count + 1
            self._board.set(self._key, str(self._count))


def _finish(save: Save, board: Board) -> str:
    """Rank 0 ends the save; returns how it failed, in words, or an empty text if it is complete."""
    parts = [_wait(f"part {rank}", save, board, rank) for rank in range(save.head.world)]
    found = [json.loads(part) if part is not None else None for part in parts]
    errors = [
        f"rank {rank}: it died or hangs, nothing is heard of it" if part is None else part["error"]
        for rank, part in enumerate(found)
        if part is None or "error" in part
    ]
    end = ""
    try:
        if not errors:
            made = manifest.merged([manifest.parse(part) for part in found if part is not None], save.writers)
            _check_files(save.aside, made)
            data_file.write(save.aside / manifest.NAME, [memoryview(manifest.to_bytes(made))])
            folder.commit(save.aside, save.head.step, save.keep, save.replace)
    except folder.Committed as error:
        end = f"{save.what} is there and complete, but {error}. Earlier checkpoints were kept."
    except Exception as error:
        errors.append(_in_words(error, 0, save))
    if errors:
        shutil.rmtree(save.aside, ignore_errors=True)
        end = f"{save.what} was not written: {'; '.join(errors[:3])}. Earlier checkpoints are as they were."
    end = end[:1].upper() + end[1:]
    board.set(save.key("end"), f"ended {end}")
    return end


def _check_files(aside: Path, made: Manifest) -> None:
    """Raises ``ValueError`` if rank 0 does not see what ranks say that they have written."""
    for file in made.files.values():
        path = aside / file.name
        found = path.stat().st_size if path.is_file() else None
        if found != file.size:
            raise ValueError(
                f"{path} {'is missing' if found is None else f'has {found} bytes'}, and {file.size} were written. "
                "Another process removes what is written here, or ranks do not share this file system"
            )


def _hear(save: Save, board: Board) -> str:
    end = _wait("end", save, board, 0)
    return end.removeprefix("ended ") if end is not None else _read_end(save, "rank 0 was not heard of any more")


def _linger(save: Save, board: Board) -> None:
    """Rank 0 holds the store, so it stays until the others have read the end. Then it removes what they said of it."""
    until = time.monotonic() + 30
    for rank in range(save.head.world):
        life = Life(board, rank)
        while board.get(save.key(f"heard {rank}")) is None and time.monotonic() < until and not life.lost():
            time.sleep(POLL)
        for what in ("part", "alive", "heard"):
            board.forget(save.key(f"{what} {rank}"))


def _read_end(save: Save, reason: str) -> str:
    """How the save ended, read from the folder, where ranks can no longer say it."""
    place = folder.path_of(save.aside.parent, save.head.step)
    with suppress(ValueError):
        if manifest.read(place).written_by.get("id") == save.aside.name:
            return ""
    return f"Whether {save.what} was written is not known here: {reason}."


class Life:
    """Whether a rank's process still gives signs of life (`watchdog`)."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._pulse: Row | None = None
        self._since = self._looked = time.monotonic()

    def lost(self) -> bool:
        """Looks once in `LOOK` seconds. Once ranks have failed, less silence is enough."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._looked = now
        pulse = self._board.row(self._rank)
        if pulse == Row() or pulse != self._pulse:
            self._pulse, self._since = pulse, now
        failed = self._board.error() is not None
        return now - self._since > (min(FAILED, watchdog.SILENCE) if failed else watchdog.SILENCE)


def _wait(what: str, save: Save, board: Board, rank: int) -> str | None:
    """What this rank says, once it is there; None where the rank is silent for too long."""
    last, since, life = None, time.monotonic(), Life(board, rank)
    begun = since
    while (found := board.get(save.key(what))) is None:
        if (now := board.get(save.key(f"alive {rank}"))) != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > SILENCE or life.lost():
            return board.get(save.key(what))
        time.sleep(min(LOOK, POLL + (time.monotonic() - begun) / 10))
    return found
