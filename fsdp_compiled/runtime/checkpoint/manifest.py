"""What a checkpoint says of itself: ``manifest.json``, with a checksum of its own.

    {"format": "fsdp_compiled checkpoint", "version": 1, "sha256": "9f86...", "content": {...}}

Every byte of it counts: what stands before the content is compared as text, and the content by its checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.runtime.checkpoint import manifest_check
from fsdp_compiled.runtime.checkpoint.cuts import Cut, part_shape
from fsdp_compiled.runtime.checkpoint.data_file import Corrupt

NAME = "manifest.json"
VERSION = 2  # 2: pieces may be of parts that were cut along tp; ranks say whose batches they had
READABLE = (1, 2)
HEAD = re.compile(rb'\{"format": "fsdp_compiled checkpoint", "version": (\d+), "sha256": "([0-9a-f]{64})", "content": ')
TAIL = b"}\n"


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor, or of a part, in memory order, from this byte of a file on."""

    start: int
    stop: int
    file: str
    offset: int
    cut: Cut | None = None


@dataclass
class Entry:
    """One tensor. ``order``: its dims from slowest to fastest in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def part_numel(self, cut: Cut | None) -> int:
        return int(torch.Size(part_shape(self.shape, cut)).numel())


@dataclass(frozen=True)
class DataFile:
    name: str
    size: int
    checksums: Sequence[str] | None  # of its blocks; None in a file of somebody else's


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


def to_bytes(manifest: Manifest) -> bytes:
    places = {file: place for place, file in enumerate(manifest.files)}
    content = {
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
        "files": [
            {"name": f.name, "size": f.size, "checksums": list(f.checksums or [])} for f in manifest.files.values()
        ],
    }
    text = json.dumps(content, separators=(",", ":")).encode()
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
        found = _parse(json.loads(body))
        wrong = manifest_check.wrong(found)
    except Exception as error:  # of another form than any that is written
        wrong = f"{type(error).__name__}, {error}"
    if wrong is not None:
        raise Corrupt(
            f"{path} says what no checkpoint of this package does, so somebody has edited it: {wrong}. {other}"
        )
    return found


def _parse(content: dict[str, Any]) -> Manifest:
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
