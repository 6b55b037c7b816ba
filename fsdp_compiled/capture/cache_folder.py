"""Inductor's cache folder, replaced where it cannot be made or written.

PyTorch makes the folder as soon as Dynamo is imported, and writes code to it even if nothing is to be cached. If the
folder cannot be written, the import fails. So this package checks the folder first, without importing Dynamo.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import tempfile
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_temporary: list[tempfile.TemporaryDirectory[str]] = []  # deleted when Python exits
log = logging.getLogger("fsdp_compiled")


def make_writable() -> None:
    """If the cache folder cannot be used, sets the variable to a temporary folder, and logs a warning."""
    place = _wanted()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK | os.X_OK):
            return
        why = "Permission denied"
    except OSError as error:
        why = error.strerror or str(error)
    _temporary.append(tempfile.TemporaryDirectory(prefix="fsdp_compiled_", ignore_cleanup_errors=True))
    os.environ[VARIABLE] = _temporary[-1].name
    log.warning(
        "the cache folder %s cannot be used (%s): what is compiled goes to %s and is gone when this process ends. Set "
        "%s to a folder that can be written", place, why, _temporary[-1].name, VARIABLE,
    )  # fmt: skip


def _leave_to_parent() -> None:
    """Runs in a forked process: leaves it to the parent process to delete the parent's folder."""
    for place in _temporary:
        place._finalizer.detach()  # type: ignore[attr-defined]


def _wanted() -> Path:
    """The cache folder, chosen as `torch._inductor.runtime.cache_dir_utils` chooses it."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
make_writable()
