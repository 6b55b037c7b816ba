"""How Inductor's C++ compiler is asked for less: several kernels at a time, and for nothing that it has told before.

**Several kernels in one translation unit.** Inductor compiles each kernel by itself. A kernel takes 0.6 s, most of it
for the header, although the header was compiled before, in 4 s. Compiled together, the first kernel takes 1.5 s with
its header, and each other one 50 ms:

    cpp_pybinding(types, source)    a `Kernel`, which stands in the generated module until all pieces are generated
    compile_together                kernels -> units -> libraries; a kernel's function takes its `Kernel`'s place

A unit holds what Inductor would compile for each kernel, with its bindings, in a separate namespace, under a separate
name. Nothing else changes: the flags are the same, and functions do not see each other, so the numbers are the same.
Inductor's own `CppPythonBindingsCodeCache` compiles and loads the unit, and finds the library of a unit that it
compiled before. Which unit holds a kernel is kept on disk (`UNITS`). Inductor itself compiles a kernel of unexpected
form, and all kernels of a unit that cannot be compiled or loaded.

**The header.** To compile a library, Inductor first compiles a header, and preprocesses the header to see whether it
has changed. It does so even for libraries that exist already; `without_headers` avoids this. Compiling the header takes
4 s and saves each library 1 s: `with_found_headers` uses an existing compiled header and compiles none.

**The processor.** Before it loads the first piece for a CPU, Inductor compiles a trial for each of the processor's
extensions and starts a Python process that loads it: half a dozen processes for each rank, at every start. A trial that
succeeded once with these flags and this compiler version succeeds again on a processor of this capability (hosts may
share the folder), so the answer is kept on disk (`remembered`).

Inductor has no hook for these: while a piece is compiled, `AsyncCompile.cpp_pybinding`, `codecache._precompile_header`
and `VecISA.check_build` are replaced, for the whole process. A thread of the user's that compiles meanwhile gets the
same answers; a second thread that is in here waits.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar
from unittest import mock

import torch

from fsdp_compiled.capture import disk_cache
from fsdp_compiled.torch_private.inductor import AsyncCompile, VecISA, codecache, isa_fingerprint

REPLACING = threading.RLock()
PROBES = "probes"  # in our part of the cache folder
UNITS = "units"  # in our part of the cache folder: by kernel, its unit and its place there; by unit, its text
T = TypeVar("T")
ENOUGH = 12  # kernels that take about as long as the header: fewer do not justify another unit
HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
FUNCTION = re.compile(r'extern "C"\s+void\s+kernel\(')
log = logging.getLogger("fsdp_compiled")


@contextmanager
def compile_together(folder: Path | None) -> Iterator[None]:
    """Inside, this thread's kernels are not compiled yet; at the end, all are. ``folder``: where to keep which unit
    holds each kernel, if anywhere."""
    thread, kernels = threading.get_ident(), list[Kernel]()

    def put_off(self: AsyncCompile, types: Sequence[str], source: str) -> Any:
        if threading.get_ident() != thread or not fits(source):
            return plain(self, types, source)
        kernels.append(Kernel(types, source))
        return kernels[-1]

    with REPLACING:
        plain = AsyncCompile.cpp_pybinding
        with mock.patch.object(AsyncCompile, "cpp_pybinding", put_off):
            yield
        if kernels:
            _compile(kernels, folder)
            _put_in_place(kernels)


class Kernel:
    """A kernel that is still to be compiled; a call before that compiles it by itself."""

    def __init__(self, types: Sequence[str], source: str) -> None:
        self.types, self.source = list(types), source
        self.function: Callable[..., Any] | None = None

    def key(self, around: str) -> str:
        return hashlib.sha256(f"{around} {self.types} {self.source}".encode()).hexdigest()

    def text(self, name: str) -> str:
        """The kernel under this name, with the bindings that Inductor gives it."""
        given: list[str] = []

        class Told(codecache.CppPythonBindingsCodeCache):
            entry_function = name
            call_entry_function = codecache.CppPythonBindingsCodeCache.call_entry_function.replace("kernel", name, 1)

            @classmethod
            def load_async(cls, main_code: str, *_: Any, **__: Any) -> Any:
                given.append(main_code)

        Told.load_pybinding_async(self.types, FUNCTION.sub(f'extern "C" void {name}(', self.source))
        return given[0]

    def __call__(self, *args: Any) -> Any:
        if self.function is None:
            self.function = codecache.CppPythonBindingsCodeCache.load_pybinding(self.types, self.source)
        return self.function(*args)


def fits(source: str) -> bool:
    """Whether the source is one function that can be renamed, and the code around it has the known form."""
    directives = {line.strip() for line in source.splitlines() if line.lstrip().startswith("#")}
    return (
        len(FUNCTION.findall(source)) == len(re.findall(r"\bkernel\b", source)) == source.count('extern "C"') == 1
        and HEADER in directives
        and all(line == HEADER or line.startswith("#pragma") for line in directives)
    )


def _compile(kernels: Sequence[Kernel], folder: Path | None) -> None:
    around = disk_cache.settings()
    distinct = {kernel.key(around): kernel for kernel in kernels}
    known = {text for key in distinct if folder is not None and (text := _known(key, folder / UNITS))}
    held = {key for text in known for key in keys_of(text)}
    missing = {key: kernel for key, kernel in distinct.items() if key not in held}
    count = min(_cores(), -(-len(missing) // ENOUGH))
    new = [unit_text(part) for part in dealt_out(missing, count, lambda kernel: len(kernel.source))]
    functions: dict[str, Callable[..., Any]] = {}
    with without_headers():  # existing libraries do not need them
        loads = {text: _loading(text) for text in known}
    with with_found_headers(), ThreadPoolExecutor(_cores()) as pool:
        loads |= {text: _loading(text) for text in new}
        for text, loaded in zip(loads, pool.map(_tried, loads.values()), strict=True):
            functions |= zip(keys_of(text), loaded, strict=False)  # no functions, if it failed
            if folder is not None and loaded and text in new:
                _remember(text, folder / UNITS)
    if missing:
        log.info("compiled %d kernels in %d translation units", len(missing), len(new))
    for kernel in kernels:
        kernel.function = functions.get(kernel.key(around))


def dealt_out(values: Mapping[str, T], count: int, cost: Callable[[T], int]) -> list[dict[str, T]]:
    """Divides the values into this many parts: the most costly first, each to the part that costs least so far."""
    parts: list[dict[str, T]] = [{} for _ in range(count)]
    load = [0] * count
    for key in sorted(values, key=lambda key: -cost(values[key])):
        least = load.index(min(load))
        parts[least][key] = values[key]
        load[least] += cost(values[key])
    return parts


def unit_text(kernels: Mapping[str, Kernel]) -> str:
    """The source of a unit with these kernels; its first lines list their keys."""
    includes: dict[str, None] = {"#define PY_SSIZE_T_CLEAN": None}
    spaces = []
    for place, kernel in enumerate(kernels.values()):
        lines = kernel.text(f"kernel_{place}").splitlines()
        includes |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        own = "\n".join(line for line in lines if line not in includes)
        spaces.append(f"namespace space_{place} {{\n{own}\n}}")
    return "\n".join([*(f"// {key}" for key in kernels), *includes, *spaces, ""])


def keys_of(text: str) -> list[str]:
    """The keys of the unit's kernels, by place."""
    return re.findall("^// ([0-9a-f]{64})$", text, re.MULTILINE)


def _loading(text: str) -> Callable[[], Any]:
    """A function that loads the unit, and compiles it first if needed."""
    names = [f"kernel_{place}" for place in range(len(keys_of(text)))]

    class Unit(codecache.CppPythonBindingsCodeCache):
        cache: ClassVar[dict[str, Any]] = {}

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            functions = []
            for name in names:
                one = type(name, (codecache.CppPythonBindingsCodeCache,), {"entry_function": name})
                functions.append(getattr(one._load_library_inner(path, key), name))  # type: ignore[attr-defined]
            return SimpleNamespace(functions=functions)

    return Unit.load_async(text, "cpu")  # type: ignore[no-any-return]


def _tried(load: Callable[[], Any]) -> list[Callable[..., Any]]:
    try:
        return load().functions  # type: ignore[no-any-return]
    except Exception as error:
        log.info("kernels are compiled one by one: a unit of them failed (%s)", str(error).partition("\n")[0])
        return []


def _known(key: str, place: Path) -> str | None:
    name = disk_cache.read(place / key, bytes.decode)
    text = disk_cache.read(place / name, bytes.decode) if name else None
    return text if text and key in keys_of(text) else None


def _remember(text: str, place: Path) -> None:
    name = hashlib.sha256(text.encode()).hexdigest()
    disk_cache.write(place / name, text.encode())
    for key in keys_of(text):
        disk_cache.write(place / key, name.encode())


def _put_in_place(kernels: Sequence[Kernel]) -> None:
    """Makes generated modules call a kernel's function directly from now on."""
    ours = {id(kernel) for kernel in kernels if kernel.function is not None}
    for module in codecache.PyCodeCache.modules:
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                setattr(module, name, value.function)


def _cores() -> int:
    """This rank's share of the host's cores."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


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


@functools.cache
def instructions() -> list[str]:
    """The extensions of this processor, of which compiled code may use any (``-march=native``)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({word for line in lines if line.startswith(("flags", "Features")) for word in line.split()[2:]})
