"""Packs all compiled code into one file: made on one machine, loaded on others, which then compile nothing.

    fsdp-compiled compile train.py --nproc 2 --out step.bundle      one machine, once
    fsdp_compiled.load_bundle("step.bundle")                        or FSDP_COMPILED_BUNDLE=step.bundle, wherever else

A bundle is the cache folder of that run: our traced programs and compiled pieces, Inductor's graphs, its shared
libraries and Triton's kernels, each under its key in the cache. Loading adds those that this machine's folder lacks,
and the keys decide what is used, as at any second start. So a bundle can save time, and cannot change what a program
does. What its keys do not hold (the processor's instructions, paths in compiler commands) is compared before loading,
and a bundle for another place is refused by name. Dynamo runs anyway: only Dynamo knows what the user's code does now.

The script that is compiled runs as it is, and its ranks are told by their environment. Each rank notes what its code
depends on. The script ends, as by ``sys.exit(0)``, after a number of calls in a row that compile nothing. All ranks end
before the same call.

**A bundle is code**: it holds shared libraries and pickles, which run as you. Its checksum finds a file that was cut or
damaged, not one that somebody made to harm. Load only what you would run. (GraphTrainer's precompile in torchtitan, and
`torch.compiler.save_cache_artifacts`, ship similar files; the latter without C++ libraries, which are compiled again.)
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import os
import platform
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fsdp_compiled.capture.cache_folder import make_writable
from fsdp_compiled.capture.disk_cache import put, versions
from fsdp_compiled.distributed.mesh import Mesh, any_rank
from fsdp_compiled.lower.cpp_compiler import instructions
from fsdp_compiled.torch_private.inductor import cache_dir

VARIABLE = "FSDP_COMPILED_BUNDLE"
# How `fsdp-compiled compile` tells the ranks of its script.
FOLDER, CALLS = "FSDP_COMPILED_COMPILE_INTO", "FSDP_COMPILED_COMPILE_CALLS"
COMPILES_ONLY = FOLDER in os.environ
_calls = 0  # calls since the last program was compiled
MAGIC = b"fsdp_compiled bundle 1\n"
SIZE = hashlib.sha256().digest_size
MANIFEST = "manifest.json"
LEFT_OUT = (
    "locks",
    "precompiled_headers",
    "fsdp_compiled_identity",
)  # of no use elsewhere
CURE = "Make one for this place: fsdp-compiled compile SCRIPT --nproc N --out BUNDLE."
log = logging.getLogger("fsdp_compiled")


class BundleError(ValueError):
    """A file that is no bundle, a damaged one, or one that was made for another place. Nothing was changed."""


def here(ranks: int) -> dict[str, Any]:
    """What compiled code depends on, under the names that errors use. JSON."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    gpu = None if index is None else f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}"
    found = versions()
    return {
        "the package's sources": found["sources"][:16],
        "PyTorch": f"{torch.__version__} ({torch.version.git_version})",
        "the folder of PyTorch, which compiler commands name": os.path.dirname(torch.__file__),
        "Python": f"{sys.implementation.cache_tag}, headers in {sysconfig.get_paths()['include']}",
        "the platform": f"{sys.platform} {platform.machine()}",
        "the processor's capability": torch.backends.cpu.get_cpu_capability(),
        "the processor's instructions": instructions(),
        "the GPU": gpu,
        "the number of ranks": ranks,
        "threads of a rank (OMP_NUM_THREADS)": torch.get_num_threads(),
    }


def differences(made_for: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two places, a line each. A processor with additional instructions will do."""
    found = []
    for name, value in now.items():
        given = made_for.get(name)
        if name == "the processor's instructions":
            if missing := sorted(set(given or ()) - set(value)):
                found.append(f"{name}: this one lacks {', '.join(missing[:8])}")
        elif given != value:
            found.append(f"{name}: made with {given}, here {value}")
    return found


def write_bundle(folder: Path, place: Path, made_for: Mapping[str, Any], script: str = "", source: bytes = b"") -> int:
    """Packs a cache folder into the file ``place``, whole or not at all; returns the number of files in it.
    ``made_for``: the result of `here` on the ranks that compiled."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and _is_shipped(path.relative_to(folder))]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        said = {"made for": made_for, "script": [script, hashlib.sha256(source).hexdigest()]}
        archive.writestr(MANIFEST, json.dumps(said))
        for path in files:
            archive.writestr(f"files/{path.relative_to(folder).as_posix()}", path.read_bytes())
    content = packed.getvalue()
    place.parent.mkdir(parents=True, exist_ok=True)
    put(place, MAGIC + hashlib.sha256(content).digest() + content, durable=True)
    return len(files)


def load_bundle(path: str | os.PathLike[str], ranks: int | None = None) -> int:
    """Makes what the bundle at ``path`` holds this machine's own, so that nothing of it is compiled; on every rank,
    before the first step. ``ranks``: how many there are; left out, the ``WORLD_SIZE`` that torchrun gave. Returns how
    many files were new here.

    Raises `BundleError`, with nothing changed, for a damaged file and for one that was made for other versions of
    PyTorch, Python or this package, another processor, GPU, or number of ranks. A script that has changed is fine: what
    is another in it is compiled, and that is said. A bundle is code, as a script is: load none that you would not run.
    """
    archive = _opened(Path(path))
    with archive:
        try:
            said = json.loads(archive.read(MANIFEST))
            files = {name: _relative(name) for name in archive.namelist() if name != MANIFEST}
        except (KeyError, ValueError) as error:
            raise BundleError(f"{path} is no bundle: {error}. {CURE}") from error
        ranks = int(os.environ.get("WORLD_SIZE", 1)) if ranks is None else ranks
        if others := differences(said["made for"], here(ranks)):
            lines = "".join(f"\n  {line}" for line in others)
            raise BundleError(f"{path} was made for another place, and is not loaded:{lines}\n{CURE}")
        contents = {target: archive.read(name) for name, target in files.items()}
    _compare_script(path, *said["script"])
    make_writable()
    folder = Path(cache_dir())
    new = [target for target in contents if not (folder / target).exists()]
    for target in new:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        put(folder / target, contents[target], durable=True)
    log.info("%s: %d of %d compiled files were new here", path, len(new), len(contents))
    return len(new)


def load_named_bundle(ranks: int) -> None:
    """Loads the bundle that the environment names, if any; logs one that cannot be used, and all is compiled."""
    if path := os.environ.get(VARIABLE):
        _load_once(path, ranks)


@functools.cache
def _load_once(path: str, ranks: int) -> None:
    try:
        load_bundle(path, ranks)
    except (BundleError, OSError) as error:
        log.warning("%s names a bundle that is of no use here, so all is compiled: %s", VARIABLE, error)


def note_program(mesh: Mesh) -> None:
    """Notes that a program was made; a script that only compiles leaves here what its code depends on."""
    global _calls
    _calls = 0
    if COMPILES_ONLY:
        Path(os.environ[FOLDER], f"rank{mesh.rank}.json").write_text(json.dumps(here(mesh.world)))


def end_if_compiled(mesh: Mesh) -> None:
    """Ends a script that only compiles, before a call, if it has nothing more to compile. Collective."""
    global _calls
    if not COMPILES_ONLY or not (limit := int(os.environ[CALLS])):
        return
    if not any_rank(_calls < limit, mesh):
        raise SystemExit(0)
    _calls += 1


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}. {CURE}") from error
    if not content.startswith(MAGIC):
        raise BundleError(f"{path} is no bundle of this package's version. {CURE}")
    hashed, rest = content[len(MAGIC) : len(MAGIC) + SIZE], content[len(MAGIC) + SIZE :]
    if hashlib.sha256(rest).digest() != hashed:
        raise BundleError(f"{path} is damaged: its checksum is another. Copy it again. {CURE}")
    try:
        return zipfile.ZipFile(io.BytesIO(rest))
    except zipfile.BadZipFile as error:
        raise BundleError(f"{path} is no bundle: {error}. {CURE}") from error


def _relative(name: str) -> Path:
    """A bundled file's path, relative to the cache folder; raises ``ValueError`` if the path would leave the folder."""
    parts = PurePosixPath(name).parts
    if parts[:1] != ("files",) or len(parts) < 2 or ".." in parts or "\\" in name or "\0" in name:
        raise ValueError(f"it holds {name!r}, which is no place in a cache folder")
    return Path(*parts[1:])


def _is_shipped(path: Path) -> bool:
    hidden = path.name.startswith(".") or path.suffix in (".lock", ".gch", ".o", ".tmp")
    return not hidden and not set(path.parts) & set(LEFT_OUT)


def _compare_script(path: str | os.PathLike[str], script: str, hashed: str) -> None:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        own = Path(main).read_bytes() if main else b""
    except OSError:
        own = b""
    if script and hashlib.sha256(own).hexdigest() != hashed:
        log.warning("%s was made from another %s: what is not the same in it is compiled", path, script)
