"""Whether a manifest with a good checksum says what this package writes: who edits one can make its checksum good too.

No file is looked for outside of the checkpoint's folder, no element stays without a value, and nothing is left to fail
once the state is being changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp_compiled.runtime.checkpoint import data_file
from fsdp_compiled.runtime.checkpoint.cuts import Cut
from fsdp_compiled.runtime.checkpoint.data_file import DTYPES
from fsdp_compiled.runtime.checkpoint.values import decode, tensor_names

if TYPE_CHECKING:
    from fsdp_compiled.runtime.checkpoint.manifest import DataFile, Entry, Manifest

LARGEST = 2**63  # of what PyTorch counts with


def wrong(manifest: Manifest) -> str | None:
    """The first thing that is not as this package writes it, in words."""
    return next(_all(manifest), None)


def _all(manifest: Manifest) -> Iterator[str]:
    if not _count(manifest.step):
        yield f"its step is {manifest.step!r}"
    if not _count(manifest.world, 1) or len(manifest.rows) != manifest.world or not all(map(_count, manifest.rows)):
        yield f"its ranks are {manifest.world!r}, with batches {list(manifest.rows)!r}"
    for file in manifest.files.values():
        yield from _file(file)
    for name, entry in manifest.tensors.items():
        yield from _tensor(name, entry, manifest.files)
    if (missing := manifest.incomplete()) is not None:
        yield f"{missing} is in no file, or twice"
    yield from _overlaps(manifest)
    for name, first in manifest.aliases.items():
        if not isinstance(first, str):
            yield f"{name} is said to be tied to {first!r}"
    yield from _values(manifest)


def _count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < LARGEST


def _file(file: DataFile) -> Iterator[str]:
    if not isinstance(file.name, str) or Path(file.name).name != file.name or file.name in ("", ".", ".."):
        yield f"{file.name!r} is no file of its folder"
    elif not _count(file.size, 8):
        yield f"{file.name} has {file.size!r} bytes"
    elif not isinstance(file.checksums, list) or len(file.checksums) != -(-file.size // data_file.BLOCK):
        yield f"{file.name} has not one checksum for each {data_file.BLOCK >> 20} MiB"


def _tensor(name: str, entry: Entry, files: Mapping[str, DataFile]) -> Iterator[str]:
    known = entry.dtype in DTYPES or entry.dtype == torch.complex128
    if not known or not all(map(_count, entry.shape)) or not _count(math.prod(entry.shape)):
        yield f"{name} is {entry.dtype} {list(entry.shape)}"
    elif sorted(entry.order) != list(range(len(entry.shape))):
        yield f"the dims of {name} are {list(entry.order)}"
    else:
        for one in entry.pieces:
            numbers = _count(one.start) and _count(one.stop, one.start) and _count(one.offset)
            if not numbers or not _fits(one.cut, entry.shape):
                yield f"a piece of {name} is {one}"
            elif one.offset + (one.stop - one.start) * entry.dtype.itemsize > files[one.file].size:
                yield f"a piece of {name} ends behind {one.file}"


def _fits(cut: Cut | None, shape: tuple[int, ...]) -> bool:
    if cut is None:
        return True
    if not (_count(cut.parts, 1) and _count(cut.part) and _count(cut.dim)):
        return False
    return cut.dim < len(shape) and cut.part < cut.parts


def _overlaps(manifest: Manifest) -> Iterator[str]:
    """Two pieces of one file in the same bytes."""
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in manifest.tensors.items():
        for one in entry.pieces:
            if one.stop > one.start:
                end = one.offset + (one.stop - one.start) * entry.dtype.itemsize
                spans.setdefault(one.file, []).append((one.offset, end, name))
    for file, found in spans.items():
        found.sort()
        for (_, end, before), (start, _, after) in pairwise(found):
            if start < end:
                yield f"{before} and {after} are in the same bytes of {file}"


def _values(manifest: Manifest) -> Iterator[str]:
    for name, value in manifest.values.items():
        trees = [value["same"]] if list(value) == ["same"] else value["by_rank"]
        if "same" not in value and (list(value) != ["by_rank"] or len(trees) != manifest.world):
            yield f"{name} has values of {len(trees)} ranks, not of {manifest.world}"
        for tree in trees:
            if lost := [one for one in tensor_names(tree) if one not in manifest.tensors]:
                yield f"{name} has a tensor {lost[0]!r} that is nowhere"
            if others := [one for one in tensor_names(tree) if not one.startswith(name)]:
                yield f"{name} has a tensor {others[0]!r} of something else"
            kind = name.partition(" ")[0]
            if kind in FORMS and not FORMS[kind](tree):
                yield f"{name} is {_short(tree)}"
    names = set(manifest.values)
    for name in {"updates", *({"optimizer", "scalars"} if "optimizer" in names else ())} - names:
        yield f"it has no {name}"


def _short(tree: Any) -> str:
    text = repr(tree)
    return text if len(text) < 200 else f"{text[:200]} ..."


def _numbers(tree: Any) -> bool:
    return type(tree) is dict and all(type(decode(one, {})) in (int, float, bool) for one in tree.values())


def _names(tree: Any) -> bool:
    return type(tree) is list and all(type(name) is str for name in tree)


def _optimizer(tree: Any) -> bool:
    groups, rows = tree["groups"], tree["parameters"]
    known = tree["class"] is None or type(tree["class"]) is str
    return known and len(groups) == len(rows) and all(type(one) is dict for one in groups) and all(map(_names, rows))


FORMS: dict[str, Callable[[Any], bool]] = {
    "updates": _count,
    "scale": _numbers,
    "optimizer": _optimizer,
    "scalars": lambda tree: all(_names(one["parameters"]) and _numbers(one["scalars"]) for one in tree),
    "eager": lambda tree: _names(tree["written"]) and {"states", "named", "attributes"} <= set(tree),
    "buffer": lambda tree: list(tree) == ["$tensor"],
    "constant": lambda tree: list(tree) == ["$tensor"],
}
