"""What Inductor asks of a C++ compiler before its first kernel is done while the step is traced.

    main     trace ......................... | pieces
    thread   trials of the processor ..|

On a machine where nothing was compiled yet, that is up to four calls of the compiler, one after another, each of which
waits for the one before: three seconds of one processor, in which the other ranks of a host wait, too. One rank of a
host makes them; who comes to a piece meanwhile waits for them (`isa_probes.REPLACING`). Where ranks are forked from a
launcher, a fork of its own makes them while it imports; a rank that comes to a piece meanwhile waits for Inductor's own
lock. What fails here fails again where it is needed, and is told there.
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


_elsewhere = False  # a fork of the launcher does it


@functools.cache  # once in a process
def begin() -> threading.Thread | None:
    """Starts the thread where all of this is to be done, by this rank."""
    if _elsewhere or not _wanted() or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(_compile,), name="fsdp_compiled warm-up", daemon=True
    )
    thread.start()
    return thread


def begin_in_a_fork() -> None:
    """Starts a process of its own, which nobody waits for, before ranks are forked from this one."""
    global _elsewhere
    if not _wanted():
        return
    _elsewhere = True
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.setsid()
        _compile()
    os._exit(0)


def _wanted() -> bool:
    place = folder()
    return place is not None and not (place / PIECES).exists()


def _compile() -> None:
    with suppress(Exception):
        with remembered(folder()):
            pick_vec_isa()
        log.info("the C++ compiler is ready")
