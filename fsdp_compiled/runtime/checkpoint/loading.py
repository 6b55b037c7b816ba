"""What all ranks do together to load: choose, compare, read and verify aside, agree, and only then write the state.

newest or named step -> manifest -> compare with this Sharded -> read into staging, verified -> all have read all
                                                                                    -> extras -> the state, in place

What a checkpoint has beside shards comes after: which of it a rank takes, and who gets it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint import manifest as manifests
from fsdp_compiled.runtime.checkpoint.contents import (
    Trained,
    check_generators,
    dealt_out,
    derive_generators,
    set_generators,
)
from fsdp_compiled.runtime.checkpoint.data_file import BLOCK, Corrupt, Reader, Request, header_of, memory_of, stored
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.matching import Match, buffer_value, write_groups
from fsdp_compiled.runtime.checkpoint.stretches import Cut, Entry, Part, Piece, Stretch, key_of, parts_of
from fsdp_compiled.runtime.checkpoint.values import Tensors, decode, digest, tensor_names

CURE = "Load another checkpoint: load(folder, step=...)."
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # where to, and the values
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
    """Read and verified, and not yet anybody's: what is wanted, and tensors of values by name."""

    pairs: Pairs
    tensors: Tensors


def read(
    path: Path,
    manifest: Manifest,
    mesh: Mesh,
    wanted: Sequence[Stretch],
    trees: Iterable[Any],
    rest: bool = True,
) -> Work[Staged]:
    """Each rank reads what it wants, all together (``rest``) every byte of every file; in stages, for `lockstep`."""
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
    staged, values = [], {}
    for one in wanted:
        entry = manifest.tensors[one.name]
        staged.append(replace(one, values=torch.empty(one.stop - one.start, dtype=entry.dtype)))
        if one.cut is not None and entry.shape[one.cut.dim] % one.cut.parts:
            staged[-1].values.zero_()  # what ends a part is in no file of other parts
        _request(entry, staged[-1], requests)
    for name in dict.fromkeys(name for tree in trees for name in tensor_names(tree)):
        values[name] = _whole(name, manifest.tensors[name])
        _request(manifest.tensors[name], values[name], requests)
    for name, reader in readers.items():
        reader.read(requests[name])
    for one in (*staged, *values.values()):
        _read_turned(manifest.tensors[one.name], one, readers)
    seen = yield Exchange("what they have read", {name: sorted(reader.verified) for name, reader in readers.items()})
    if rest:
        for name, reader in readers.items():
            unseen = sorted(
                set(range(-(-manifest.files[name].size // BLOCK))) - {block for one in seen for block in one[name]}
            )
            reader.read([], unseen[mesh.rank :: mesh.world])
        check_headers(path, manifest, list(manifest.files)[mesh.rank :: mesh.world])
    return Staged(
        [(one.values, aside.values) for one, aside in zip(wanted, staged, strict=True)],
        {name: one.values.view(one.shape) for name, one in values.items()},
    )


def _whole(name: str, entry: Entry) -> Stretch:
    """Room for all of it, in the order of its dims."""
    values = torch.empty(entry.numel, dtype=entry.dtype)
    return Stretch(name, 0, entry.numel, values, entry.shape, tuple(range(len(entry.shape))))


def _lies_alike(piece: Piece, entry: Entry, one: Stretch) -> bool:
    return piece.cut == one.cut and entry.order == one.order


def _are_parts_of_one_cut(one: Cut | None, other: Cut | None) -> bool:
    """Two different ones, which have nothing in common."""
    return one is not None and other is not None and one != other and one._replace(part=other.part) == other


def _request(entry: Entry, one: Stretch, requests: dict[str, list[Request]]) -> None:
    """What lies in files as it does here."""
    size, memory = entry.dtype.itemsize, memory_of(one.values)
    for piece in entry.pieces:
        first, last = max(one.start, piece.start), min(one.stop, piece.stop)
        if first < last and _lies_alike(piece, entry, one):
            begin, end = (piece.offset + (place - piece.start) * size for place in (first, last))
            into = memory[(first - one.start) * size : (last - one.start) * size]
            requests[piece.file].append(Request(begin, end, into))


def _read_turned(entry: Entry, one: Stretch, readers: Mapping[str, Reader]) -> None:
    """What was cut in another way, or has its dims in another order: a piece at a time, where rectangles meet."""
    turned = [p for p in entry.pieces if not _lies_alike(p, entry, one) and not _are_parts_of_one_cut(p.cut, one.cut)]
    here, size = parts_of(one) if turned else [], entry.dtype.itemsize
    for piece in turned:
        held = torch.empty(piece.stop - piece.start, dtype=entry.dtype)  # of which only what is read takes memory
        there = parts_of(Stretch(one.name, piece.start, piece.stop, held, entry.shape, entry.order, piece.cut))
        copies = [pair for own in here for other in there if (pair := _common(own, other)) is not None]
        if copies:
            begin = min(source.storage_offset() for _, source in copies)
            end = max(source.storage_offset() + _extent(source) for _, source in copies)
            request = Request(piece.offset + begin * size, piece.offset + end * size, memory_of(held[begin:end]))
            readers[piece.file].read([request])
            for to, source in copies:
                to.copy_(source)


def _common(own: Part, other: Part) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The elements that both rectangles have, as each has them."""
    begin = [max(pair) for pair in zip(own[0], other[0], strict=True)]
    ends = ([start + size for start, size in zip(at, view.shape, strict=True)] for at, view in (own, other))
    end = [min(pair) for pair in zip(*ends, strict=True)]
    if any(start >= stop for start, stop in zip(begin, end, strict=True)):
        return None
    first, second = (
        view[tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, at, strict=True))] for at, view in (own, other)
    )
    return first, second


def _extent(view: torch.Tensor) -> int:
    """Elements of memory from its first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))


def write(pairs: Pairs) -> None:
    """Puts values in their places; the tensors stay where they are."""
    with torch.no_grad():
        for to, values in pairs:
            to.copy_(values)


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
    said: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file in said and (count := piece.stop - piece.start):
                whole = piece.cut is None and count == entry.numel
                row_major = list(entry.order) == sorted(entry.order)
                dtype, shape = stored(entry.dtype, entry.shape if whole and row_major else (count,))
                key = key_of(name, piece.start, piece.stop, whole, piece.cut)
                end = piece.offset + count * entry.dtype.itemsize
                said[piece.file][key] = dtype, list(shape), piece.offset, end
    for file, expected in said.items():
        header, first = header_of(folder / file)
        try:
            found = {
                key: (one["dtype"], one["shape"], first + start, first + stop)
                for key, one in header.items()
                for start, stop in [one["data_offsets"]]
                if start < stop
            }
        except (TypeError, KeyError, ValueError) as error:
            raise Corrupt(f"{folder / file} does not begin with a header of safetensors ({error}). {CURE}") from error
        for key in sorted({*expected, *found}):
            if expected.get(key) != found.get(key):
                raise Corrupt(
                    f"{folder / file} has {key} as {found.get(key)} (dtype, shape, first and last byte), where the "
                    f"manifest says {expected.get(key)}: somebody has edited one of them. {CURE}"
                )


def check_saved_extra(
    manifest: Manifest, values: Mapping[str, tuple[Any, bool]], extra: Mapping[str, Any], world: int
) -> None:
    """``world``: how many ranks with batches of their own there are."""
    before = len(set(manifest.rows))
    for name, holder in extra.items():
        if f"extra {name}" in values and before != world and dealt_out(holder):
            raise ValueError(
                f"extra[{name!r}] deals examples out to {world} ranks, and its state in the checkpoint says how many "
                f"each of {before} had taken: examples would be skipped or seen twice. Load on as many ranks, or leave "
                "it out, and begin behind the examples that all ranks together have taken."
            )
        if not values.get(f"extra {name}", (None, True))[1]:
            raise ValueError(
                f"extra[{name!r}] was saved with another state on each of {manifest.world} ranks, and cannot be "
                "given to another number of them. Load on as many ranks, or leave it out; what is to be loaded on any "
                "number has a state_dict() that is the same on all ranks."
            )


def load_extra(values: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """Gives the user's objects their states; the function that is returned gives them those that they had."""
    before: list[tuple[Any, Any]] = []

    def undo() -> None:
        for holder, state in reversed(before):
            try:
                holder.load_state_dict(state)
            except Exception as error:
                log.error("a %s cannot be given its state back: %s", type(holder).__name__, error)

    try:
        for name, holder in extra.items():
            if f"extra {name}" in values:
                if callable(getattr(holder, "state_dict", None)):
                    before.append((holder, copy.deepcopy(holder.state_dict())))
                holder.load_state_dict(values[f"extra {name}"])
    except BaseException:
        undo()
        raise
    return undo


def chosen_values(
    manifest: Manifest, found: Match, extra: Mapping[str, Any], rank: int, rows: Sequence[int]
) -> dict[str, tuple[Any, bool]]:
    """The values that this rank takes, as JSON, each with whether it is its own."""
    fixed = ["updates", "scale", "random", *["local"] * found.local]
    constants = [f"constant {name}" for name in found.constants]
    for name in found.buffers:
        if (value := buffer_value(manifest, name)) is not None:
            manifest.values[f"buffer {name}"] = value
    buffers = [f"buffer {name}" for name in found.buffers]
    owned = [*found.owned.values(), *["owners"] * bool(found.owned)]
    wanted = [*fixed, *owned, *constants, *buffers, *(f"extra {name}" for name in extra)]
    pairs = {name: values_for(manifest, name, rank, rows) for name in wanted}
    return {name: pair for name, pair in pairs.items() if pair is not None}


def match_local(manifest: Manifest, trained: Trained, found: Match, rank: int, rows: Sequence[int]) -> None:
    """Whether this rank goes on from what was saved of local steps, and if there is some and it does not, why."""
    pair = values_for(manifest, "local", rank, rows)
    if pair is None:
        return
    saved, own = pair
    sizes = {name: manifest.tensors[tree["$tensor"]].shape for name, tree in saved["state"].items()}
    found.local = trained.local is not None and own and trained.local.fits(saved, sizes, trained.state)
    if not found.local:
        found.differences.append(
            f"it is of local steps (Policy.sync_every) of {saved['sites']} sites of {saved['ranks']} ranks, which each "
            "have an optimizer's state of their own, and other sites, units or none are here; what fits of it are "
            f"weights, those of the last exchange, {saved['steps']} steps before, and each element of that state as "
            "one site had it"
        )


def prepare_values(
    values: Mapping[str, tuple[Any, bool]],
    tensors: Mapping[str, torch.Tensor],
    found: Match,
    trained: Trained,
    row: str,
) -> Callable[[], None]:
    """A function that writes them. ``row``: whose batches this rank has, of how many."""
    state = trained.state
    written: Pairs = []
    fresh: dict[str, torch.Tensor] = {}  # what the loss updates, and no program reads yet
    for key, numbers in found.scalars.items():
        for name, number in numbers.items():
            written.append(_filled(state.optimizer[f"{key}.{name}"], decode(number, tensors)))
    for name, (tree, _) in values.items():
        kind, _, rest = name.partition(" ")
        if kind == "updates":
            written.append(_filled(state.step, tree))
        elif kind == "scale":
            written += [_filled(state.scale[one], decode(n, tensors)) for one, n in tree.items() if one in state.scale]
        elif kind in ("buffer", "constant"):
            known = state.buffers if kind == "buffer" else state.constants
            value = decode(tree, tensors)
            if rest in known:
                written.append((known[rest], value.view(known[rest].shape)))
            else:
                fresh[rest] = value
    owned = {name: decode(values[key][0], tensors) for name, key in found.owned.items() if key in values}
    others = decode(values["owners"][0], tensors) if "owners" in values else []
    groups = [{k: decode(v, {}) for k, v in one.items()} for one in found.options or ()]
    random, own = values.get("random", (None, False))  # none in what was converted from another format
    drawn = decode(random, tensors) if own else {}
    if own:
        check_generators(drawn)

    def write_them() -> None:
        if trained.local is not None:
            trained.local.load(decode(values["local"][0], tensors) if found.local else None, state)
        state.ages.loaded(found.updated)
        write([*written, *((total, total.new_zeros(())) for total in state.sums.values())])
        state.constants.update(fresh)
        for update, one in zip(trained.updates, others, strict=False):
            update.go_on(owned, one)
            update.show(state.optimizer)
        if trained.optimizer is not None and found.options is not None:
            write_groups(trained.optimizer, groups, found.written)
        if own:
            set_generators(drawn, state, trained.plan.device)
        elif random is not None:
            derive_generators(f"{digest(random, tensors)} {row}", state, trained.plan.device)

    return write_them


def _filled(to: torch.Tensor, number: float) -> tuple[torch.Tensor, torch.Tensor]:
    return to, torch.full_like(to, number)
