"""Runs what Inductor does before its first kernel in the background.

    main     trace ......................... | pieces
    thread   trials of the processor ..|

On a machine where nothing was compiled yet, that is up to four calls of the compiler, one after another, each of which
waits for the one before: three seconds of one processor, in which the other ranks of a host wait, too. One rank of a
host makes them; who comes to a piece meanwhile waits for them (`isa_probes.REPLACING`). What fails here fails again
where it is needed, and is told there.

What a machine needs once may be done when the package is set up (`prepare`, in ``make train``'s): the trials, and the
header that all kernels include, compiled. Both stay on disk, where a first run finds them.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import threading
from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.capture.disk_cache import folder
from fsdp_compiled.lower.inductor import PIECES
from fsdp_compiled.lower.isa_probes import remembered
from fsdp_compiled.torch_private.inductor import compile_alone, pick_vec_isa

log = logging.getLogger("fsdp_compiled")


@functools.cache  # once in a process
def begin() -> threading.Thread | None:
    """Starts the thread where all of this is to be done, by this rank."""
    if not _wanted() or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(_compile,), name="fsdp_compiled warm-up", daemon=True
    )
    thread.start()
    return thread


def prepare() -> None:
    """What is paid once a machine: the trials, and the header of all kernels, by a kernel that nobody calls.

    Nothing is said where there is no compiler: who needs one is told.
    """
    with suppress(Exception), remembered(folder()), FakeTensorMode():
        graph = torch.fx.Graph()
        given = graph.placeholder("matrix")
        result = graph.call_function(torch.ops.aten.relu.default, (given,))
        graph.output((result,))
        given.meta["val"] = result.meta["val"] = matrix = torch.empty(8, 8)
        compile_alone(torch.fx.GraphModule({}, graph), [matrix], dynamic_shapes="from_graph")


def _wanted() -> bool:
    place = folder()
    return place is not None and not (place / PIECES).exists()


def _compile() -> None:
    with suppress(Exception):
        with remembered(folder()):
            pick_vec_isa()
        log.info("the C++ compiler is ready")
