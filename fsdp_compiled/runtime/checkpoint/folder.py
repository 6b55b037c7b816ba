"""The folder of a run's checkpoints: ``step-N`` is complete or absent, no matter what is killed and when.

.step-N.<random>     written aside    ->  files on the disk  ->  renamed to step-N, the parent on the disk
                                      ->  only then older ones are removed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from fsdp_compiled.runtime.checkpoint.manifest import NAME

COMPLETE = re.compile(r"step-(0|[1-9][0-9]*)")  # as `path_of` names them
ASIDE = re.compile(r"\.step-\d+\.[0-9a-f]{8}")
LOCK = ".lock"
TAKEN = (errno.EACCES, errno.EAGAIN)
UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # file systems that cannot sync a folder say one of these
REPLACED = re.compile(r"\.(step-\d+)\.replaced")  # the old checkpoint, while another takes its name
OTHERS = {  # files of other layouts, which `convert` reads
    ".metadata": "what torch.distributed.checkpoint wrote",
    "model.safetensors": "weights as Hugging Face has them",
    "model.safetensors.index.json": "weights as Hugging Face has them",
}
_locks: dict[str, tuple[int, int]] = {}  # by folder: which process has it, and its open file as long as that lives
_writing: dict[str, tuple[str, int]] = {}  # by the folder aside that this process writes: its parent, its step
_fresh: dict[Path, list[Path]] = {}  # by folder: the folders in which it and its parents were made, not synced yet
_looking = threading.Lock()


class Committed(Exception):
    """The checkpoint is complete under its name, but what had to follow could not be done."""


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def steps(folder: Path) -> list[int]:
    """The steps of which there are complete checkpoints, in ascending order."""
    if not folder.is_dir():
        return []
    found = [match[1] for match in map(COMPLETE.fullmatch, os.listdir(folder)) if match]
    return sorted(int(number) for number in found if (folder / f"step-{number}" / NAME).is_file())


def check(folder: Path) -> None:
    """Raises ``ValueError`` for a path that is no folder; it would otherwise pass for a folder without checkpoints."""
    try:
        os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise ValueError(
                f"{folder} is a link to {os.readlink(folder)}, which is not there. Is a disk missing?"
            ) from None
    except OSError as error:
        reason = "is a file" if folder.is_file() else f"cannot be read: {error.strerror}"
        raise ValueError(f"{folder} {reason}. Give the folder of the checkpoints.") from error


def refuse_other(folder: Path) -> None:
    """Raises ``ValueError`` for a folder without checkpoints in which somebody expected some."""
    if (folder / NAME).is_file():
        step = f", step={folder.name.removeprefix('step-')}" if COMPLETE.fullmatch(folder.name) else ""
        raise ValueError(
            f"{folder} is a checkpoint itself. Give the folder that it is in: load({str(folder.parent)!r}{step})."
        )
    for name, whose in OTHERS.items():
        if (folder / name).is_file():
            raise ValueError(
                f"{folder} holds no checkpoints of this package, but {name}, {whose}. In a shell: "
                f"fsdp-compiled convert {folder} NEW --to ours; then load(NEW)."
            )


def lock(folder: Path) -> None:
    """Keeps this folder for the checkpoints of this process until it ends.

    Raises ``ValueError`` if another process has it. The lock is the operating system's, on a file (``lockf``, which
    works over NFS). It ends with the process, however that ends, and no child inherits it.
    """
    key = str(folder.resolve())
    if _holds(key, folder / LOCK):
        return
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor)
    except OSError as error:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno not in TAKEN:
            return  # a file system without locks
        raise ValueError(
            f"Another process saves checkpoints in {folder}{f' ({owner})' if owner else ''}, and would remove this "
            "run's. Give each run a folder of its own, or end that process first."
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    _locks[key] = os.getpid(), descriptor


def _holds(key: str, path: Path) -> bool:
    """Whether this process has the lock itself, not the process that it was forked from, and the folder is not gone."""
    process, descriptor = _locks.get(key, (None, -1))
    if process != os.getpid():
        return False
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return True
    os.close(descriptor)
    del _locks[key]
    return False


def _lock(descriptor: int) -> None:
    """Tries for a while: the process that was killed a moment ago may still be ending."""
    for attempt in range(20):
        try:
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if attempt == 19 or error.errno not in TAKEN:
                raise
            time.sleep(0.1)


def begin(folder: Path, step: int, replace: bool) -> Path:
    """Makes a new folder aside, to write this step's checkpoint in. Called by one rank.

    Raises ``ValueError`` if the step or a newer one is there already, if another `Sharded` of this process is writing
    one of them, or if the folder cannot be written. Call `end` when it is no longer written.
    """
    try:
        new = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
        restore(folder)
        there = path_of(folder, step)
        if there.exists() and not there.is_dir():
            raise ValueError(f"{there} is a file. Remove it, or save to another folder.")
        if there.exists() and not replace:
            raise ValueError(
                f"{there} exists. Save another step, remove it, or pass replace=True, which replaces it whole."
            )
        if newer := [number for number in steps(folder) if number > step]:
            raise ValueError(
                f"{folder} holds checkpoints of later steps than {step} ({', '.join(map(str, newer[:5]))}), from which "
                "load(folder) would go on. Remove them, or save to another folder."
            )
        clear(folder)
        aside = folder / f".step-{step}.{uuid.uuid4().hex[:8]}"
        _claim(aside, step)
        _fresh.setdefault(folder, []).extend(one.parent for one in new)
        try:
            aside.mkdir()
        except OSError:
            end(aside)
            raise
    except OSError as error:
        raise ValueError(f"No checkpoint can be written in {folder}: {error.strerror or error}.") from error
    return aside


def _claim(aside: Path, step: int) -> None:
    """Notes that this process writes this step. Raises ``ValueError`` if it writes that step or a later one already."""
    key = str(aside.parent.resolve())
    with _looking:
        if at := [number for place, number in _writing.values() if place == key and number >= step]:
            raise ValueError(
                f"Another Sharded of this process is writing the checkpoint of step {at[0]} in {aside.parent}, which "
                f"step {step} would replace or come behind. Give each a folder of its own, or wait for the other's "
                "future.result() first."
            )
        _writing[aside.name] = key, step


def end(aside: Path) -> None:
    """Notes that the folder is no longer being written."""
    _writing.pop(aside.name, None)


def abandon(aside: Path) -> None:
    """Removes a folder that will not be completed."""
    shutil.rmtree(aside, ignore_errors=True)
    end(aside)


@contextlib.contextmanager
def aside(target: Path) -> Iterator[Path]:
    """A new folder, which becomes ``target`` at once and whole if the block ends without an error, or else is removed.

    The target may exist if it is empty.
    """
    place = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        place.mkdir(parents=True)
        yield place
        sync(place)
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()
        os.rename(place, target)
        sync(target.parent)
    finally:  # it is gone once it has been renamed
        shutil.rmtree(place, ignore_errors=True)


def clear(folder: Path) -> None:
    """Removes what unfinished saves have left. The lock ensures that no other process is still writing one."""
    for name in os.listdir(folder):
        if ASIDE.fullmatch(name) and name not in _writing:
            shutil.rmtree(folder / name, ignore_errors=True)


def restore(folder: Path) -> None:
    """Gives checkpoints their names back whose replacement was killed between two renames."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if (match := REPLACED.fullmatch(name)) is None:
            continue
        if (folder / match[1]).exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.rename(folder / name, folder / match[1])


def commit(aside: Path, step: int, keep: int | None, replace: bool) -> None:
    """Makes the folder the checkpoint of its step, at once and whole; then removes all but the ``keep`` newest.

    Raises ``OSError`` if the checkpoint is not there, and `Committed` if it is there, but not surely on the disk.
    """
    folder = aside.parent
    sync(aside)
    while fresh := _fresh.get(folder, []):
        sync(fresh[-1])
        fresh.pop()
    place = path_of(folder, step)
    if not place.exists():
        os.rename(aside, place)  # fails if another process's checkpoint has come there meanwhile
    elif replace:
        _exchange(aside, place)
    else:
        raise FileExistsError(errno.EEXIST, "It has come there while this one was written, by another job", str(place))
    try:
        sync(folder)
    except OSError as error:
        raise Committed(
            f"its folder cannot be put on the disk ({error.strerror or error}), and it may be lost if the machine fails"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)  # the checkpoint that was replaced
    try:
        for number in steps(folder)[:-keep] if keep is not None else ():
            remove(path_of(folder, number))
    except OSError as error:
        raise Committed(f"older ones cannot be removed ({error.strerror or error})") from error


def remove(path: Path) -> None:
    """Removes a complete checkpoint; its name never stands for half of one."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        os.rename(path, aside)
        sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(aside: Path, place: Path) -> None:
    """Swaps both names at once if the system can; else the old one goes aside between two renames, for `restore`."""
    import ctypes

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        if rename(-100, os.fsencode(aside), -100, os.fsencode(place), 2) == 0:  # AT_FDCWD, RENAME_EXCHANGE
            return
    except AttributeError:
        pass
    old = place.with_name(f".{place.name}.replaced")
    os.rename(place, old)
    try:
        os.rename(aside, place)
    except OSError:
        os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(folder: Path) -> None:
    """Syncs the folder's own entries to the disk, if its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSYNCABLE:
            raise
    finally:
        os.close(descriptor)
