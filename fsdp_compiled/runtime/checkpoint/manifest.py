"""What a checkpoint says of itself: ``manifest.json``, with a checksum of its own.

    {"format": "fsdp_compiled checkpoint", "version": 1, "sha256": "9f86...", "content": {...}}

Every byte of it counts: what stands before the content is compared as text, and the content by its checksum. Who edits
a manifest can make its checksum good too, so `wrong_in` looks whether it says what this package writes: no file outside
of the checkpoint's folder, no element without a value, and nothing that fails only once the state is being changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.runtime.checkpoint import data_file
from fsdp_compiled.runtime.checkpoint.data_file import DTYPES, Corrupt
from fsdp_compiled.runtime.checkpoint.stretches import Cut, Entry, Piece
from fsdp_compiled.runtime.checkpoint.values import decode, tensor_names

LARGEST = 2**63  # of what PyTorch counts with


def wrong_in(manifest: Manifest) -> str | None:
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
    "buffer": lambda tree: list(tree) == ["$tensor"],
    "constant": lambda tree: list(tree) == ["$tensor"],
}


NAME = "manifest.json"
VERSION = 2  # 2: pieces may be of parts that were cut along tp; ranks say whose batches they had
READABLE = (1, 2)
HEAD = re.compile(rb'\{"format": "fsdp_compiled checkpoint", "version": (\d+), "sha256": "([0-9a-f]{64})", "content": ')
TAIL = b"}\n"


@dataclass(frozen=True)
class DataFile:
    name: str
    size: int
    checksums: Sequence[str]  # of its blocks


@dataclass
class Manifest:
    """``values``: by name, ``{"same": tree}`` or ``{"by_rank": [tree, ...]}``. ``aliases``: other names of tied
    parameters, each with the first. ``rows``: whose batches each rank had, its place among those with batches of their
    own; ranks along tp have one in common."""

    step: int
    world: int
    tensors: dict[str, Entry]
    values: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    files: dict[str, DataFile]
    written_by: Mapping[str, str]
    rows: Sequence[int] = (0,)

    def holds(self, file: str, start: int, stop: int) -> str:
        """What stands between two offsets of a file, in words."""
        found = []
        for name, entry in self.tensors.items():
            for piece in entry.pieces:
                size = (piece.stop - piece.start) * entry.dtype.itemsize
                if piece.file == file and piece.offset < stop and start < piece.offset + size:
                    found.append(name)
                    break
        if not found:
            return "the file's header"
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(found[:3]) + more

    def incomplete(self) -> str | None:
        """A tensor of which elements are missing or written twice."""
        for name, entry in self.tensors.items():
            cuts = dict.fromkeys(piece.cut for piece in entry.pieces) or {None: None}
            first = next(iter(cuts))
            if first is not None:  # every other part as well, and nothing else
                cuts = dict.fromkeys([*(first._replace(part=part) for part in range(first.parts)), *cuts])
            for cut in cuts:
                position = 0
                where = name if cut is None else f"{name}, {cut}"
                if (cut and cut._replace(part=0)) != (first and first._replace(part=0)):
                    return f"{where}, element 0"
                for piece in sorted((p for p in entry.pieces if p.cut == cut), key=lambda piece: piece.start):
                    if piece.start != position:
                        return f"{where}, element {min(position, piece.start)}"
                    position = piece.stop
                if position != entry.part_numel(cut):
                    return f"{where}, element {position}"
        return None


def merged(parts: Sequence[Manifest], writers: Mapping[str, Sequence[int]]) -> Manifest:
    """What ranks have written each, as one; ``writers``: who has each value. The first part has all tensors.

    Raises ``ValueError`` if an element is missing, a fault of this package.
    """
    made = replace(parts[0], tensors={}, values={}, files={})
    for part in parts:
        made.files |= part.files
        for name, entry in part.tensors.items():
            made.tensors.setdefault(name, replace(entry, pieces=[])).pieces += entry.pieces
    for name, ranks in writers.items():
        trees = [parts[rank].values[name] for rank in ranks]
        made.values[name] = {"same": trees[0]} if len(trees) == 1 else {"by_rank": trees}
    if (missing := made.incomplete()) is not None:
        raise ValueError(f"{missing} would be missing or twice in the checkpoint")
    return made


def content_of(manifest: Manifest) -> dict[str, Any]:
    """As JSON, which `parse` reads."""
    places = {file: place for place, file in enumerate(manifest.files)}
    return {
        "step": manifest.step,
        "world": manifest.world,
        "rows": list(manifest.rows),
        "written_by": dict(manifest.written_by),
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                **({"order": list(entry.order)} if list(entry.order) != sorted(entry.order) else {}),
                "pieces": [[p.start, p.stop, places[p.file], p.offset, *(p.cut or ())] for p in entry.pieces],
            }
            for name, entry in manifest.tensors.items()
        },
        "aliases": manifest.aliases,
        "values": manifest.values,
        "files": [{"name": f.name, "size": f.size, "checksums": list(f.checksums)} for f in manifest.files.values()],
    }


def to_bytes(manifest: Manifest) -> bytes:
    text = json.dumps(content_of(manifest), separators=(",", ":")).encode()
    head = '{"format": "fsdp_compiled checkpoint", "version": %d, "sha256": "%s", "content": '
    return (head % (VERSION, hashlib.sha256(text).hexdigest())).encode() + text + TAIL


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises `Corrupt`, with the file and the cure."""
    path = folder / NAME
    other = "Load another checkpoint: load(folder, step=...)."
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Corrupt(f"{path} is missing, so {folder} is no complete checkpoint of this package. {other}") from None
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror}. {other}") from error
    match = HEAD.match(text)
    if match is None:
        raise Corrupt(f"{path} does not begin as a manifest of this package does: it is foreign or damaged. {other}")
    if (version := int(match[1])) not in READABLE:
        raise Corrupt(
            f"{path} has version {version}, and this package reads up to {VERSION}: it was written by a "
            f"{'newer' if version > VERSION else 'different'} one, or is damaged. Install the one that wrote it."
        )
    body = text[match.end() : -len(TAIL)]
    if not text.endswith(TAIL) or hashlib.sha256(body).hexdigest().encode() != match[2]:
        raise Corrupt(f"{path} is damaged: it is not what its own checksum says. {other}")
    try:
        found = parse(json.loads(body))
        wrong = wrong_in(found)
    except Exception as error:  # of another form than any that is written
        wrong = f"{type(error).__name__}, {error}"
    if wrong is not None:
        raise Corrupt(
            f"{path} says what no checkpoint of this package does, so somebody has edited it: {wrong}. {other}"
        )
    return found


def parse(content: dict[str, Any]) -> Manifest:
    files = [DataFile(one["name"], one["size"], one["checksums"]) for one in content["files"]]
    tensors = {
        name: Entry(
            tuple(one["shape"]),
            getattr(torch, one["dtype"]),
            tuple(one.get("order", range(len(one["shape"])))),
            [
                Piece(start, stop, files[file].name, offset, Cut(*cut) if cut else None)
                for start, stop, file, offset, *cut in one["pieces"]
            ],
        )
        for name, one in content["tensors"].items()
    }
    return Manifest(
        content["step"], content["world"], tensors, content["values"], content["aliases"],
        {file.name: file for file in files}, content["written_by"], content.get("rows", range(content["world"])),
    )  # fmt: skip
