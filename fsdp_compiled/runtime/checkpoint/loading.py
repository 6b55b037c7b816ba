"""What all ranks do together to load: choose, compare, read and verify aside, agree, and only then write the state.

newest or named step -> manifest -> compare with this Sharded -> read into staging, verified -> all have read all
                                                                                    -> extras -> the state, in place
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint import manifest as manifests
from fsdp_compiled.runtime.checkpoint.data_file import BLOCK, Corrupt, Reader, Request, header_of, memory_of, stored
from fsdp_compiled.runtime.checkpoint.geometry import Cut, common, part_shape, runs
from fsdp_compiled.runtime.checkpoint.manifest import Entry, Manifest, Piece
from fsdp_compiled.runtime.checkpoint.stretches import Stretch, key_of
from fsdp_compiled.runtime.checkpoint.values import Tensors, tensor_names

Room = Callable[[int, torch.dtype], torch.Tensor]
Row = tuple[str, str, tuple[int, ...], int]  # key, dtype, shape, where it ends
log = logging.getLogger("fsdp_compiled")


def choose(folder: Path, step: int | None) -> Path | None:
    """The folder of the newest complete checkpoint, or of the one of this step; None where there is none."""
    folders.check(folder)
    folders.restore(folder)
    found = folders.steps(folder)
    if not found:
        folders.refuse_other(folder)
    if step is None:
        return folders.path_of(folder, found[-1]) if found else None
    if step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise ValueError(f"{folder} holds no complete checkpoint of step {step}; there are: {there}.")
    if found[-1] > step:
        log.warning(
            "%s holds checkpoints of later steps than %d. What is trained from here on is another history: remove "
            "them, or save to another folder.", folder, step,
        )  # fmt: skip
    return folders.path_of(folder, step)


@dataclass(frozen=True)
class Staged:
    """Read and verified, and not yet anybody's: what is wanted with its values, and tensors of values by name."""

    pairs: Sequence[tuple[Stretch, torch.Tensor]]
    tensors: Tensors


def read(
    path: Path,
    manifest: Manifest,
    mesh: Mesh,
    wanted: Sequence[Stretch],
    trees: Iterable[Any],
    rest: bool = True,
    room: Room | None = None,
) -> Work[Staged]:
    """Each rank reads what it wants, all together (``rest``) every byte of every file; in stages, for `lockstep`.

    ``room``: gives memory for what is wanted, which `write` then copies to where it belongs.
    """
    take = room or _fresh
    readers = {
        file.name: Reader(
            path / file.name,
            file.size,
            file.checksums,
            lambda a, b, name=file.name: manifest.holds(name, a, b),  # type: ignore[misc]
        )
        for file in manifest.files.values()
    }
    requests: dict[str, list[Request]] = {name: [] for name in readers}
    pairs = [(one, _request(manifest.tensors[one.name], one, requests, take)) for one in wanted]
    tensors: Tensors = {}
    for name in dict.fromkeys(name for tree in trees for name in tensor_names(tree)):
        entry = manifest.tensors[name]
        tensors[name] = _all_of(entry, None, requests)
    for name, reader in readers.items():
        reader.read(requests[name])
    seen = yield Exchange("what they have read", {name: sorted(reader.verified) for name, reader in readers.items()})
    if rest:
        for name, reader in readers.items():
            count = -(-manifest.files[name].size // BLOCK) if manifest.files[name].checksums is not None else 0
            unseen = sorted(set(range(count)) - {block for one in seen for block in one[name]})
            reader.read([], unseen[mesh.rank :: mesh.world])
        known = [file.name for file in manifest.files.values() if file.checksums is not None]
        check_headers(path, manifest, known[mesh.rank :: mesh.world])
    return Staged(
        [(one, _finished(manifest.tensors[one.name], one, values)) for one, values in pairs],
        {name: _in_dims(manifest.tensors[name], values).contiguous() for name, values in tensors.items()},
    )


def _fresh(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def _request(entry: Entry, one: Stretch, requests: dict[str, list[Request]], take: Room) -> torch.Tensor:
    """Memory for it; for all of the tensor, or its part, where its dims lie in another order."""
    if one.order != entry.order:
        return _all_of(entry, one.cut, requests)
    values = take(one.stop - one.start, entry.dtype)
    if one.cut is not None and entry.shape[one.cut.dim] % one.cut.parts:
        values.zero_()  # what ends a part is in no file of other parts
    _ask(entry, one.cut, one.start, one.stop, values, requests)
    return values


def _all_of(entry: Entry, cut: Cut | None, requests: dict[str, list[Request]]) -> torch.Tensor:
    """Room for all of it, or of a part, in memory order."""
    values = torch.zeros(part_shape(entry.shape, cut), dtype=entry.dtype)
    _ask(entry, cut, 0, entry.part_numel(cut), values, requests)
    return values


def _ask(
    entry: Entry, cut: Cut | None, start: int, stop: int, values: torch.Tensor, requests: dict[str, list[Request]]
) -> None:
    size = entry.dtype.itemsize
    memory = memory_of(values)
    own = None
    for piece in entry.pieces:
        if piece.cut == cut:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                begin, end = (piece.offset + (place - piece.start) * size for place in (first, last))
                into = memory[(first - start) * size : (last - start) * size]
                requests[piece.file].append(Request(begin, end, into))
            continue
        own = own or runs(entry.shape, entry.order, cut, start, stop)
        here, there, length = common(own, runs(entry.shape, entry.order, piece.cut, piece.start, piece.stop))
        if len(length):
            places = torch.stack([piece.offset + (there - piece.start) * size, (here - start) * size, length * size])
            begin, end = int(places[0, 0]), int(places[0, -1] + places[2, -1])
            requests[piece.file].append(Request(begin, end, memory, places))


def _finished(entry: Entry, one: Stretch, values: torch.Tensor) -> torch.Tensor:
    """The wanted elements, in the order in which they are wanted."""
    if one.order == entry.order:
        return values
    return _in_dims(entry, values, one.cut).permute(one.order).reshape(-1)[one.start : one.stop].clone()


def _in_dims(entry: Entry, values: torch.Tensor, cut: Cut | None = None) -> torch.Tensor:
    """The whole tensor, or a part, in its own dims, of its elements in memory order."""
    shape = part_shape(entry.shape, cut)
    return values.view([shape[dim] for dim in entry.order]).permute(
        [entry.order.index(dim) for dim in range(len(shape))]
    )


def write(staged: Staged) -> None:
    """Puts the values in their places; the tensors stay where they are."""
    with torch.no_grad():
        for one, values in staged.pairs:
            one.values.copy_(values)


def open_manifest(path: Path, mesh: Mesh) -> Work[Manifest]:
    """The manifest, the same on every rank; in stages, for `lockstep`."""
    found = manifests.read(path)
    yield f"{path.name} {found.written_by.get('id', '')}"
    return found


def values_for(manifest: Manifest, name: str, rank: int, rows: Sequence[int]) -> tuple[Any, bool] | None:
    """The JSON of a value for this rank, and whether it is this rank's own or the same for all; None if none is saved.

    ``rows``: of all ranks, whose batches they have. Where as many ranks had batches of their own, a rank's own value is
    that of the first with the same; of one that ranks along tp had apart, as on the same mesh. Else, where ranks had
    different ones, it is rank 0's, and not its own.
    """
    found: Mapping[str, Any] | None = manifest.values.get(name)
    if found is None:
        return None
    if "same" in found:
        return found["same"], True
    saved = list(manifest.rows)
    if saved == list(rows):
        return found["by_rank"][rank], True
    of_row = [[tree for tree, row in zip(found["by_rank"], saved, strict=True) if row == one] for one in set(saved)]
    alike = all(tree == trees[0] for trees in of_row for tree in trees)  # which were then written once
    if set(saved) == set(rows) and alike:
        return found["by_rank"][saved.index(rows[rank])], True
    return found["by_rank"][0], False


def check_headers(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises `Corrupt`, with the file and the tensor, where one of these files says something else."""
    said: dict[str, dict[int, Row]] = {name: {} for name in names}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file in said and piece.stop > piece.start:
                said[piece.file][piece.offset] = _row(name, entry, piece)
    for file, rows in said.items():
        found = dict(_rows(folder / file))
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


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """What has bytes in the file, by where it begins."""
    try:
        header, first = header_of(path)
        for key, one in header.items():
            start, stop = (first + place for place in one["data_offsets"])
            if start < stop:
                yield start, (key, one["dtype"], tuple(one["shape"]), stop)
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror}. Load another checkpoint.") from error
    except (TypeError, KeyError, ValueError) as error:
        raise Corrupt(
            f"{path} does not begin with a header of safetensors ({error}). Load another checkpoint."
        ) from error


def _shown(row: Row | None) -> str:
    return "nothing" if row is None else f"{row[0]} ({row[1]} {list(row[2])}, to byte {row[3]})"
