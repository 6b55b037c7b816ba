"""Weights in the layout of Hugging Face: safetensors files under the names of ``model.state_dict()``.

    folder/config.json                             where the model has one
           model.safetensors                       or, where that is too large,
           model-00001-of-00002.safetensors  ...   with
           model.safetensors.index.json            which tensor is in which

`weight_export` writes such a folder and `weight_import` reads it, each rank its own part; `weight_keys` has the names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_compiled.runtime.checkpoint.data_file import DTYPES
from fsdp_compiled.runtime.checkpoint.manifest import DataFile, Entry, Manifest, Piece

LARGEST = 5 << 30  # bytes of a file
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH = {text: dtype for dtype, text in DTYPES.items()}


def is_there(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def rows_of(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Keys by file, in their order: as many as ``largest`` bytes hold, and one where it alone is larger."""
    rows: list[list[str]] = [[]]
    total = 0
    for key, size in sizes.items():
        if rows[-1] and total + size > largest:
            rows.append([])
            total = 0
        rows[-1].append(key)
        total += size
    return rows


def names_of(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The files for tensors of so many bytes each, and which keys are in them."""
    rows = rows_of(sizes, LARGEST)
    if len(rows) == 1:
        return {SINGLE: rows[0]}
    return {f"model-{n:05d}-of-{len(rows):05d}.safetensors": row for n, row in enumerate(rows, 1)}


def write_index(folder: Path, sizes: Mapping[str, int]) -> None:
    """Where there are several files."""
    files = names_of(sizes)
    if len(files) > 1:
        weight_map = {key: name for name, row in files.items() for key in row}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """What is in the folder's safetensors files, by key. Raises ``ValueError`` where there are none, or bad ones."""
    try:
        if (folder / INDEX).is_file():
            names = _indexed(folder / INDEX)
        elif (folder / SINGLE).is_file():
            names = [SINGLE]
        else:
            there = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
            raise ValueError(
                f"{folder} has neither model.safetensors nor {INDEX}"
                + (f"; {there} is a pickle, which is not read: save it with safe_serialization=True." if there else ".")
            )
        found = Manifest(0, 1, {}, {}, {}, {}, {"id": str(folder)})
        for name in names:
            _read_header(folder / name, found)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {type(error).__name__}: {error}.") from error
    return found


def _indexed(path: Path) -> list[str]:
    """The files that the index names."""
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no index of weights, or damaged ({type(error).__name__}: {error}).") from error
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{path} names {name!r}, which is no file of its folder.")
    return names


def _read_header(path: Path, found: Manifest) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path} is no safetensors file: its header would be {length} bytes long, of {size}.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file, or damaged: its header is no JSON ({error}).") from error
    found.files[path.name] = DataFile(path.name, size, None)
    spans = []
    for key, described in header.items():
        try:
            entry, begin, end = _entry(described)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: {key} is {described!r}. The file is damaged, or of a dtype that is not known here."
            ) from error
        if entry.numel:
            entry.pieces.append(Piece(0, entry.numel, path.name, 8 + length + begin))
        found.tensors[key] = entry
        spans.append((begin, end, key))
    position = 0
    for begin, end, key in sorted(spans):  # end to end, as the format has it
        if begin != position:
            raise ValueError(
                f"{path}: {key} begins at byte {begin}, and what is before it ends at {position}: damaged."
            )
        position = end
    if 8 + length + position != size:
        raise ValueError(f"{path} has {size} bytes, and its tensors end at {8 + length + position}: damaged.")


def _entry(described: Any) -> tuple[Entry, int, int]:
    """What a header says of one tensor, without pieces, and where its bytes begin and end."""
    dtype, shape, (begin, end) = TORCH[described["dtype"]], described["shape"], described["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("not in whole numbers")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError("not as many bytes as elements")
    return Entry(tuple(shape), dtype, tuple(range(len(shape)))), begin, end
