"""What Inductor asks of a C++ compiler before its first kernel is done while the step is traced.

    main     trace ......................... | pieces
    thread   trials of the processor ..|

On a machine where nothing was compiled yet, that is up to four calls of the compiler, one after another, each of which
waits for the one before: three seconds of one processor, in which the other ranks of a host wait, too. One rank of a
host makes them; who comes to a piece meanwhile waits for them (`isa_probes.REPLACING`). What fails here fails again
where it is needed, and is told there.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import threading
from contextlib import suppress

from fsdp_compiled.capture.disk_cache import folder
from fsdp_compiled.lower.inductor import PIECES
from fsdp_compiled.lower.isa_probes import remembered
from fsdp_compiled.torch_private.inductor import pick_vec_isa

log = logging.getLogger("fsdp_compiled")


@functools.cache  # once in a process
def begin() -> threading.Thread | None:
    """Starts the thread where all of this is to be done, by this rank."""
    place = folder()
    if place is None or (place / PIECES).exists() or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(_compile,), name="fsdp_compiled warm-up", daemon=True
    )
    thread.start()
    return thread


def _compile() -> None:
    with suppress(Exception):
        with remembered(folder()):
            pick_vec_isa()
        log.info("the C++ compiler is ready")
