"""Files that outlive the process: bytes under a key, in a folder that processes share.

A reader finds a whole file or none. `put` writes a temporary file beside the target and then moves it there, so two
ranks may write the same file at once. Each file begins with the hash of its content. A file that is damaged or cannot
be read any more counts as missing and is replaced; a folder that cannot be written keeps nothing. Neither is an error,
since all cached content can be made again. The keys of compiled code include `settings`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import backends

from fsdp_compiled.capture.cache_folder import make_writable
from fsdp_compiled.capture.global_modes import now
from fsdp_compiled.torch_private.inductor import cache_dir, config
from fsdp_compiled.torch_private.names import find, there

T = TypeVar("T")
log = logging.getLogger("fsdp_compiled")


def folder() -> Path | None:
    """The folder for compiled code; None if Inductor's caches are turned off, or there is no Inductor.

    Inductor writes code to its cache folder in any case; a folder that cannot be written is replaced.
    """
    make_writable()
    if not there("Inductor"):
        return None
    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    return Path(cache_dir()) / "fsdp_compiled"


def identity(place: Path) -> str:
    """A text that is unique to this folder, and the same on all hosts that share it. The first caller makes it."""
    file = place / "fsdp_compiled_identity"
    try:
        with suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=place, prefix=".") as own:
            own.write(uuid.uuid4().hex.encode())
            own.flush()
            os.link(own.name, file)  # atomic, and never overwrites another process's file
        return file.read_text()
    except OSError:  # no such links there, as on some network file systems
        return f"{socket.gethostname()} {place}"


def read(place: Path, load: Callable[[bytes], T]) -> T | None:
    """The result of ``load`` on the bytes that `write` put there; None if there are none, or ``load`` fails."""
    try:
        content = place.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read (%s): it is made anew", place, error)
        return None
    hashed, rest = content[: hashlib.sha256().digest_size], content[hashlib.sha256().digest_size :]
    if hashlib.sha256(rest).digest() != hashed:
        log.warning("%s is damaged: it is made anew", place)
        return None
    try:
        return load(rest)
    except Exception as error:  # whatever a reader of another day's file may raise
        log.warning("%s cannot be used (%s: %s): it is made anew", place, type(error).__name__, error)
        return None


def write(place: Path, content: bytes) -> None:
    """Writes the bytes to the file, and replaces a file that was there before."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        put(place, hashlib.sha256(content).digest() + content)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next start makes it anew", place, error)


def put(place: Path, content: bytes, durable: bool = False) -> None:
    """Writes the file with all of its content, or leaves it as it was; ``durable``: even if the machine stops."""
    with whole_file(place, "wb", durable) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, mode: str = "w", durable: bool = True) -> Iterator[IO[Any]]:
    """A file that is at ``path`` once all of it is written, and on disk if ``durable``; until then, what was there
    stays."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with unfinished.open(mode) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def settings() -> str:
    """A hash of versions, modes and hardware: if it is equal, compiling the same program gives the same code."""
    found = {**versions(), **_modes(), **_machine()}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, Any]:
    root = Path(__file__).parent.parent  # the package
    sources = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root / "kernels").glob("*.py")]):  # rglob does not follow the link
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return {
        "sources": sources.hexdigest(),
        "torch": (torch.__version__, torch.version.git_version),
        "python": sys.version_info[:2],
    }


def _modes() -> dict[str, Any]:
    """The modes and settings that decide how PyTorch dispatches, differentiates, types and chooses operators."""
    einsum = backends.opt_einsum
    return {
        "modes": now(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "functorch": find("torch._functorch.config").get_hash(),
        "einsum": (einsum.is_available(), einsum.enabled, einsum.strategy),  # type: ignore[attr-defined]
        "quantized": backends.quantized.engine,
    }


def _machine() -> dict[str, Any]:
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return {
        "cpu": (backends.cpu.get_cpu_capability(), torch.get_num_threads()),
        "gpu": None if index is None else (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)),
    }
