"""The manifest of a checkpoint: ``manifest.json``, with a checksum of its own.

    {"format": "fsdp_compiled checkpoint", "version": 3, "sha256": "9f86...", "content": {...}}

Every byte of it counts: the part before the content is compared as text, and the content by its checksum. Whoever edits
a manifest can correct its checksum too. So `wrong_in` checks that files are in the folder and that each element is in
one of them. A load compares the manifest with the files' headers, and makes all that it writes before it writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.runtime.checkpoint import data_file
from fsdp_compiled.runtime.checkpoint.chunks import Entry, Piece, overlap, split_state_name
from fsdp_compiled.runtime.checkpoint.data_file import DTYPES, Corrupt
from fsdp_compiled.runtime.checkpoint.values import tensor_names


def wrong_in(manifest: Manifest) -> Iterator[str]:
    """What in it is not as this package writes it, in words, as far as the files' headers do not say it as well."""
    if len(manifest.rows) != manifest.world:
        yield f"its ranks are {manifest.world!r}, with batches {list(manifest.rows)!r}"
    for file in manifest.files.values():
        if not isinstance(file.name, str) or Path(file.name).name != file.name or file.name in ("", ".", ".."):
            yield f"{file.name!r} is no file of its folder"
        if len(file.checksums) != -(-file.size // data_file.BLOCK):
            yield f"{file.name} has not one checksum for each {data_file.BLOCK >> 20} MiB"
    for name, entry in manifest.tensors.items():
        if entry.dtype not in {*DTYPES, torch.complex128} or min(entry.shape, default=0) < 0:
            yield f"{name} is {entry.dtype} {list(entry.shape)}"
        for one in entry.pieces:
            if not 0 <= one.start <= one.start + one.numel * entry.dtype.itemsize <= manifest.files[one.file].size:
                yield f"a piece of {name} is {one}, which is not in the file"
    if (missing := manifest.incomplete()) is not None:
        yield missing
    for name in {"updates", *({"optimizer", "scalars"} if "optimizer" in manifest.values else ())} - {*manifest.values}:
        yield f"it has no {name}"
    for name, value in manifest.values.items():
        trees = [value["same"]] if "same" in value else value["by_rank"]
        if "same" not in value and len(trees) != manifest.world:
            yield f"{name} has values of {len(trees)} ranks, not of {manifest.world}"
        for key in tensor_names(trees):
            if key not in manifest.tensors or not key.startswith(name):
                yield f"{name} has a tensor {key!r} that is nowhere, or of something else"


NAME = "manifest.json"
VERSION = 3
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
    parameters, each with the first. ``rows``: for each rank, whose batches it had, as a place among the ranks with
    batches of their own; ranks along tp share one."""

    step: int
    world: int
    tensors: dict[str, Entry]
    values: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    files: dict[str, DataFile]
    written_by: Mapping[str, str]
    rows: Sequence[int] = (0,)

    def first(self, name: str) -> Any:
        """A value as JSON: that of all ranks, or rank 0's."""
        return first_of(self.values[name])

    @cached_property
    def records(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state that was saved once for each parameter, as JSON, by parameter."""
        return {name: one["scalars"] for one in self.first("scalars") for name in one["parameters"]}

    @cached_property
    def states(self) -> dict[str, set[str]]:
        """The names of the state that was saved for each element, by parameter."""
        found: dict[str, set[str]] = {}
        for of in filter(None, map(split_state_name, self.tensors)):
            found.setdefault(of[0], set()).add(of[1])
        return found

    def holds(self, file: str, start: int, stop: int) -> str:
        """What is between two offsets of a file, in words."""
        found = []
        for name, entry in self.tensors.items():
            for piece in entry.pieces:
                size = piece.numel * entry.dtype.itemsize
                if piece.file == file and piece.start < stop and start < piece.start + size:
                    found.append(name)
                    break
        if not found:
            return "the file's header"
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(found[:3]) + more

    def incomplete(self) -> str | None:
        """The tensor of which elements are missing or written twice, in words."""
        for name, entry in self.tensors.items():
            written = 0
            meeting: list[Piece] = []  # earlier pieces that may reach as far along the first dim
            for piece in sorted(entry.pieces, key=lambda piece: piece.offsets):
                at, sizes = piece.offsets, piece.sizes
                written += math.prod(map(min, sizes, [whole - o for whole, o in zip(entry.shape, at, strict=True)]))
                meeting = [one for one in meeting if not at or one.offsets[0] + one.sizes[0] > at[0]]
                if any(overlap(at, sizes, one.offsets, one.sizes) for one in meeting):
                    return f"elements of {name} from {list(at)} on are in files twice"
                meeting.append(piece)
            if written != entry.numel:
                return f"{written} of {entry.numel} elements of {name} are in files"
        return None


def first_of(value: Mapping[str, Any]) -> Any:
    return value["same"] if "same" in value else value["by_rank"][0]


def merged(parts: Sequence[Manifest], writers: Mapping[str, Sequence[int]]) -> Manifest:
    """Merges what each rank has written; ``writers``: the ranks that have each value. The first part has all tensors.

    Raises ``ValueError`` if an element is missing or written twice, which is a fault of this package.
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
        raise ValueError(f"the checkpoint would not be whole: {missing}")
    return made


def content_of(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON, which `parse` reads."""
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
                "pieces": [[p.offsets, p.sizes, places[p.file], p.start] for p in entry.pieces],
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
    if (version := int(match[1])) != VERSION:
        raise Corrupt(
            f"{path} has version {version}, and this package reads {VERSION}: it was written by "
            f"{'a newer' if version > VERSION else 'an older'} one, or is damaged. Install the one that wrote it."
        )
    body = text[match.end() : -len(TAIL)]
    if not text.endswith(TAIL) or hashlib.sha256(body).hexdigest().encode() != match[2]:
        raise Corrupt(f"{path} is damaged: it is not what its own checksum says. {other}")
    with refusing_edited(path, ValueError):
        found = parse(json.loads(body))
        wrong = next(wrong_in(found), None)
    if wrong is not None:
        raise edited(path, wrong)
    return found


def edited(path: Path, what: str) -> Corrupt:
    return Corrupt(
        f"{path} says what no checkpoint of this package does, so somebody has edited it: {what}. Load another "
        "checkpoint: load(folder, step=...)."
    )


@contextmanager
def refusing_edited(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Raises `Corrupt` if what is read has a form that this package never writes."""
    caught: tuple[type[Exception], ...] = (TypeError, LookupError, AttributeError, OverflowError, *more)
    try:
        yield
    except caught as error:
        raise edited(path, f"{type(error).__name__}, {error}") from error


def parse(content: dict[str, Any]) -> Manifest:
    files = [DataFile(one["name"], one["size"], one["checksums"]) for one in content["files"]]
    tensors = {
        name: Entry(
            tuple(one["shape"]),
            getattr(torch, one["dtype"]),
            [
                Piece(tuple(offsets), tuple(sizes), files[file].name, start)
                for offsets, sizes, file, start in one["pieces"]
            ],
        )
        for name, one in content["tensors"].items()
    }
    return Manifest(
        content["step"], content["world"], tensors, content["values"], content["aliases"],
        {file.name: file for file in files}, content["written_by"], content["rows"],
    )  # fmt: skip
