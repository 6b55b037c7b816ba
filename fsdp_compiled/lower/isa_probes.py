"""Finds out once which vector instructions the compiler here makes code for, and keeps the answer on disk.

Before it loads the first piece for a CPU, Inductor compiles a trial for each of the processor's extensions and starts a
Python process that loads it: half a dozen processes for each rank, at every start. A trial that succeeded once with
these flags and this compiler version succeeds again on a processor of this capability: hosts may share the folder.

To compile a library, Inductor first compiles a header, and preprocesses the header to see whether it has changed. It
does so even for libraries that exist already; `without_headers` avoids this. Compiling the header takes 4 s and saves
each library 1 s: `with_found_headers` uses an existing compiled header and compiles none.

Inductor has no hook for this: while a piece is compiled, `VecISA.check_build` is replaced, for the whole process. A
thread of the user's that compiles meanwhile gets the same answers; a second thread that is in here waits.

This module also lists what this processor can do (`instructions`).
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fsdp_compiled.capture import disk_cache
from fsdp_compiled.torch_private.inductor import VecISA, codecache, isa_fingerprint


@functools.cache
def instructions() -> list[str]:
    """The extensions of this processor, of which compiled code may use any (``-march=native``)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({word for line in lines if line.startswith(("flags", "Features")) for word in line.split()[2:]})


REPLACING = threading.RLock()
PROBES = "probes"  # in our part of the cache folder


@contextmanager
def remembered(folder: Path | None) -> Iterator[None]:
    """Inside, trials that succeeded before are skipped; those that failed are repeated. None: all are made."""

    def asked(isa: VecISA, code: str) -> bool:
        assert folder is not None
        compiler = isa_fingerprint(isa.build_arch_flags())
        said = f"{torch.backends.cpu.get_cpu_capability()} {compiler} {isa._arch_flags} {code}"
        place = folder / PROBES / hashlib.sha256(said.encode()).hexdigest()
        succeeded = disk_cache.read(place, lambda content: content) is not None
        if not succeeded and (succeeded := check(isa, code)):
            disk_cache.write(place, said.encode())
        return succeeded

    if folder is None:
        yield
        return
    with REPLACING:
        check = VecISA.check_build
        with mock.patch.object(VecISA, "check_build", asked):
            yield


@contextmanager
def without_headers() -> Iterator[None]:
    """Inside, libraries are loaded, or compiled without a header that was compiled before; for the whole process."""
    with REPLACING, mock.patch.object(codecache, "_precompile_header", lambda *_, **__: ""):
        yield


@contextmanager
def with_found_headers() -> Iterator[None]:
    """Inside, a header that was compiled before is used, and none is compiled; for the whole process."""
    with REPLACING:
        before, build, thread = codecache._precompile_header, codecache._worker_compile_cpp, threading.get_ident()

        @functools.cache
        def find(header: str, command: str, **options: Any) -> str:
            if not any(Path(codecache._HEADER_DIR).glob("*.gch")):
                return ""
            codecache._worker_compile_cpp = lambda *given: None if threading.get_ident() == thread else build(*given)
            try:
                place = before.__wrapped__(header, command, **options)
            finally:
                codecache._worker_compile_cpp = build
            return place if Path(f"{place}.gch").exists() else ""

        with mock.patch.object(codecache, "_precompile_header", find):
            yield
