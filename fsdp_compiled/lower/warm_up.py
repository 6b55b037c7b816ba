"""What Inductor does before its first kernel is done while something else is.

    main     trace ......................... | pieces
    thread   trials of the processor ..|

On a machine where nothing was compiled yet, that is up to four calls of the compiler, one after another, each of which
waits for the one before: three seconds of one processor, in which the other ranks of a host wait, too. One rank of a
host makes them; who comes to a piece meanwhile waits for them (`isa_probes.REPLACING`). Where ranks are forked from a
launcher, a fork of its own makes them while it imports; a rank that comes to a piece meanwhile waits for Inductor's own
lock. What fails here fails again where it is needed, and is told there.

    launcher    torch | imports | a product, compiled | ranks
    a fork                      | trials of the processor ....

Half of what Inductor takes for a first piece are modules that it imports, patterns that it traces and PyTorch's sources
that it hashes: 1.3 s, in each rank. So the launcher compiles a matrix product, for which no C++ is written, while the
trials are made, and its forks find all of this done.

What a machine needs once may be done when the package is set up (`prepare`, in ``make train``'s): the trials, and the
header that all kernels include, compiled. Both stay on disk, where a first run finds them.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.capture.disk_cache import folder
from fsdp_compiled.lower.inductor import PIECES
from fsdp_compiled.lower.isa_probes import remembered
from fsdp_compiled.torch_private.inductor import compile_alone, pick_vec_isa, torch_key

log = logging.getLogger("fsdp_compiled")
WITH_KERNELS = ("torch.utils.cpp_extension", "sympy.physics.units")  # what Inductor imports when it writes a kernel

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


def before_forks() -> None:
    """In the launcher: the trials in a process of its own, which nobody waits for, and meanwhile the product."""
    if _wanted():
        _begin_in_a_fork()
        compile_product()


def compile_product() -> None:
    """Two matrices' product, which nobody calls."""
    with suppress(Exception):
        _compile_call(torch.ops.aten.mm.default, 2)
        torch_key()
        for name in WITH_KERNELS:
            importlib.import_module(name)


def prepare() -> None:
    """What is paid once a machine: the trials, and the header of all kernels, by a kernel that nobody calls.

    Nothing is said where there is no compiler: who needs one is told.
    """
    compile_product()
    with suppress(Exception), remembered(folder()):
        _compile_call(torch.ops.aten.relu.default, 1)


def _compile_call(target: OpOverload, count: int) -> None:
    """Has Inductor compile an operator on so many matrices."""
    with _quietly(), FakeTensorMode():
        graph = torch.fx.Graph()
        given = [graph.placeholder(f"matrix_{place}") for place in range(count)]
        result = graph.call_function(target, tuple(given))
        graph.output((result,))
        matrix = torch.empty(8, 8)
        for node in (*given, result):
            node.meta["val"] = matrix
        compile_alone(torch.fx.GraphModule({}, graph), [matrix] * count, dynamic_shapes="from_graph")


@contextmanager
def _quietly() -> Iterator[None]:
    """PyTorch's interpreter of graphs has a progress bar, shown or not; tqdm, where it is there, starts a thread with
    the first, which looks after all, and a process with a thread is not to be forked. Torch 2.14 warns that
    nothing of a product can be kept."""
    bars, logger = torch.hub.tqdm, logging.getLogger("torch._inductor.standalone_compile")
    before = getattr(bars, "monitor_interval", 0), logger.disabled
    bars.monitor_interval, logger.disabled = 0, True
    try:
        yield
    finally:
        bars.monitor_interval, logger.disabled = before


def _begin_in_a_fork() -> None:
    global _elsewhere
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
