"""Whether a file's own header says of what is in it what the manifest says: names, elements, dtypes and places.

A manifest can be edited and its checksum made anew. Two tensors of one size would then be taken for each other, and
the checksums of the files' bytes would still be right; but each file has the names too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdp_compiled.runtime.checkpoint.data_file import Corrupt, stored
from fsdp_compiled.runtime.checkpoint.image import key_of
from fsdp_compiled.runtime.checkpoint.manifest import Entry, Manifest, Piece

Row = tuple[str, str, tuple[int, ...], int]  # key, dtype, shape, where it ends


def check(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises `Corrupt`, with the file and the tensor, where one of these files says something else."""
    said: dict[str, dict[int, Row]] = {name: {} for name in names}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file in said and piece.stop > piece.start:
                said[piece.file][piece.offset] = _row(name, entry, piece)
    for file, rows in said.items():
        found = dict(_header(folder / file))
        for offset in sorted({*rows, *found}):
            if rows.get(offset) != found.get(offset):
                raise Corrupt(
                    f"{folder / file} has {_shown(found.get(offset))} at byte {offset}, where the manifest says "
                    f"{_shown(rows.get(offset))}: somebody has edited one of them. Load another checkpoint: "
                    "load(folder, step=...)."
                )


def _row(name: str, entry: Entry, piece: Piece) -> Row:
    count = piece.stop - piece.start
    whole = piece.cut is None and count == entry.numel
    row_major = list(entry.order) == sorted(entry.order)
    dtype, shape = stored(entry.dtype, entry.shape if whole and row_major else (count,))
    key = key_of(name, piece.start, piece.stop, whole, piece.cut)
    return key, dtype, shape, piece.offset + count * entry.dtype.itemsize


def _header(path: Path) -> Iterator[tuple[int, Row]]:
    """What has bytes in the file, by where it begins."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        header.pop("__metadata__", None)
        for key, one in header.items():
            start, stop = (8 + size + place for place in one["data_offsets"])
            if start < stop:
                yield start, (key, one["dtype"], tuple(one["shape"]), stop)
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror}. Load another checkpoint.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(
            f"{path} does not begin with a header of safetensors ({error}). Load another checkpoint."
        ) from error


def _shown(row: Row | None) -> str:
    return "nothing" if row is None else f"{row[0]} ({row[1]} {list(row[2])}, to byte {row[3]})"
