"""Inductor's cache folder, replaced where it cannot be made or written.

PyTorch makes it as soon as Dynamo is imported, and writes code to it even where nothing is to be cached: an unwritable
one stops the import. So the package looks at it first, without importing any of that.
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
    """Sets the variable to a folder of this process's own if the one that it names is of no use, and says so."""
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
    """In a fork: a folder of the process that it was forked from is that one's to delete."""
    for place in _temporary:
        place._finalizer.detach()  # type: ignore[attr-defined]


def _wanted() -> Path:
    """As `torch._inductor.runtime.cache_dir_utils` chooses it."""
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
