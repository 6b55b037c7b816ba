"""What Inductor asks of a C++ compiler before its first kernel is done while the step is traced.

    main     trace ................................. | wait | kernels
    thread   trials of the processor, header, a kernel ..|

On a machine where nothing was compiled yet, that is half a dozen calls of the compiler, one after another, each of
which waits for the one before: eight seconds of one processor, in which the other ranks of a host wait, too. One rank
of a host makes them, by compiling a kernel that does nothing, as Inductor would; who comes to a piece meanwhile waits
for the trials (`isa_probes.REPLACING`), and for the header where it is needed (Inductor's lock on disk). What fails
here fails again where it is needed, and is told there.
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
from fsdp_compiled.torch_private.inductor import codecache, pick_vec_isa

log = logging.getLogger("fsdp_compiled")
KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) {
    at::vec::Vectorized<float>(0).store(out);
}
"""


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
        codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], KERNEL)
        log.info("the C++ compiler is ready")
