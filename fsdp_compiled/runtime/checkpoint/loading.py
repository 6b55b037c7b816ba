"""What all ranks do together to load: choose, compare, read and verify aside, agree, and only then write the state.

newest or named step -> manifest -> compare with this Sharded -> read into staging, verified -> all have read all
                                                                                    -> extras -> the state, in place

The values beside the shards come after that: which of them a rank takes, and who gets them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.distributed.mesh import Exchange, Mesh, Work
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint.chunks import Chunk, Piece, Shape, by_name, key_of, overlap, place_of, whole_chunk
from fsdp_compiled.runtime.checkpoint.contents import (
    Trained,
    check_generators,
    dealt_out,
    derive_generators,
    set_generators,
    sources,
)
from fsdp_compiled.runtime.checkpoint.data_file import BLOCK, Corrupt, Reader, Request, header_of, memory_of, stored
from fsdp_compiled.runtime.checkpoint.manifest import Manifest, refusing_edited
from fsdp_compiled.runtime.checkpoint.manifest import read as read_manifest
from fsdp_compiled.runtime.checkpoint.matching import Match, buffer_value, match, refusal, report, write_groups
from fsdp_compiled.runtime.checkpoint.saving import row_of
from fsdp_compiled.runtime.checkpoint.values import Tensors, decode, digest, tensor_names

CURE = "Load another checkpoint: load(folder, step=...)."
# The part of a piece that is wanted: its target, and the offsets of the tensor between which it lies.
Copy = tuple[torch.Tensor, Piece, tuple[Shape, Shape]]
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


def load(
    folder: Path, step: int | None, strict: bool, trained: Trained, extra: Mapping[str, Any], mesh: Mesh
) -> Work[int | None]:
    """Loads a checkpoint; in stages, for `lockstep`. Nothing is changed unless every rank has read and verified all of
    it."""
    chosen = choose(folder, step) if mesh.rank == 0 else None
    said = yield Exchange("which checkpoint", (chosen, row_of(mesh)))
    chosen, rows = said[0][0], [row for _, row in said]
    if chosen is None:
        return None
    manifest = read_manifest(chosen)
    yield f"{chosen.name} {manifest.written_by.get('id', '')}"
    with refusing_edited(chosen):
        found = match(manifest, trained, place_of(mesh))
    match_local(manifest, trained, found, mesh.rank, rows)
    found.differences += [
        f"extra[{name!r}] is not in the checkpoint" for name in extra if f"extra {name}" not in manifest.values
    ]
    if found.differences and strict:
        raise ValueError(refusal(f"{chosen} is of another model or optimizer", found.differences))
    values = chosen_values(manifest, found, extra, mesh.rank, rows)
    trees = [tree for tree, _ in values.values()]
    pairs, tensors = yield from read(chosen, manifest, mesh, found.wanted, trees)
    check_saved_extra(manifest, values, extra, len(set(rows)))
    with refusing_edited(chosen, RuntimeError):
        row = f"{row_of(mesh)} of {len(set(rows))}"
        write_values = prepare_values(values, tensors, found, trained, row)
    undo = load_extra({name: decode(tree, tensors) for name, (tree, _) in values.items()}, extra)
    try:
        yield "what they have read is whole"
    except BaseException:
        undo()
        raise
    write(pairs)
    write_values()
    if mesh.rank == 0:
        report(str(chosen), found.differences)
        saved = [name.removeprefix("extra ") for name in manifest.values if name.startswith("extra ")]
        if idle := [name for name in saved if name not in extra]:
            log.warning("%s holds extra %s too, which load was not given.", chosen, ", ".join(map(repr, idle)))
    return manifest.step


def read(
    path: Path, manifest: Manifest, mesh: Mesh, wanted: Sequence[Chunk], trees: Iterable[Any], rest: bool = True
) -> Work[tuple[Pairs, Tensors]]:
    """Each rank reads what it wants; with ``rest``, all together read every byte of every file. Returns what is wanted,
    and the values' tensors by name, verified and not yet in use. In stages, for `lockstep`."""
    tensors = manifest.tensors
    staged = [replace(one, values=torch.empty(one.values.shape, dtype=tensors[one.name].dtype)) for one in wanted]
    values = {name: None for tree in trees for name in tensor_names(tree)}
    values = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype) for name in values}
    copies: dict[str, list[Copy]] = {name: [] for name in manifest.files}
    for one in (*staged, *(whole_chunk(name, value) for name, value in values.items())):
        for piece in tensors[one.name].pieces:
            common = overlap(one.offsets, tuple(one.values.shape), piece.offsets, piece.sizes)
            if common is not None:
                copies[piece.file].append((_between(one.values, one.offsets, *common), piece, common))
    readers: dict[str, Reader] = {}
    for name, file in manifest.files.items():
        readers[name] = Reader(path / name, file.size, file.checksums, partial(manifest.holds, name))
        _read_file(readers[name], copies[name])
    seen = yield Exchange("what they have read", {name: sorted(reader.verified) for name, reader in readers.items()})
    if rest:
        for name, reader in readers.items():
            unseen = sorted(
                set(range(-(-manifest.files[name].size // BLOCK))) - {block for one in seen for block in one[name]}
            )
            reader.read([], unseen[mesh.rank :: mesh.world])
        check_headers(path, manifest, list(manifest.files)[mesh.rank :: mesh.world])
    return [(one.values, aside.values) for one, aside in zip(wanted, staged, strict=True)], values


def _read_file(reader: Reader, copies: Sequence[Copy]) -> None:
    requests: list[Request] = []
    turned: Pairs = []  # parts whose order in the file is not that of here
    for to, piece, common in copies:
        held = torch.empty(piece.numel, dtype=to.dtype)  # only what is read takes memory of it
        source = _between(held.view(piece.sizes), piece.offsets, *common)
        begin = source.storage_offset()
        end = begin + 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        alike = to.is_contiguous() and source.is_contiguous()
        start, stop = (piece.start + at * to.itemsize for at in (begin, end))
        requests.append(Request(start, stop, memory_of(to if alike else held[begin:end])))
        turned += [] if alike else [(to, source)]
    reader.read(requests)
    write(turned)


def _between(values: torch.Tensor, offsets: Shape, begin: Shape, end: Shape) -> torch.Tensor:
    """The part of a chunk at these offsets that lies between ``begin`` and ``end``."""
    return values[tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offsets, strict=True))]


def write(pairs: Pairs) -> None:
    """Copies values into their tensors, which stay where they are."""
    with torch.no_grad():
        for to, values in pairs:
            to.copy_(values)


def values_for(manifest: Manifest, name: str, rank: int, rows: Sequence[int]) -> tuple[Any, bool] | None:
    """The JSON of a value for this rank, and whether it is this rank's own or the same for all; None if none is saved.

    ``rows``: for each rank, whose batches it has. If as many ranks had batches of their own, a rank's own value is that
    of the first with the same batches; if ranks along tp had different values, only on the same mesh. Otherwise, where
    ranks had different values, it is rank 0's, and not this rank's own.
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
    alike = all(tree == trees[0] for trees in of_row for tree in trees)  # such values were written once
    if set(saved) == set(rows) and alike:
        return found["by_rank"][saved.index(rows[rank])], True
    return found["by_rank"][0], False


def check_headers(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises `Corrupt`, with the file and the tensor, if the header of one of these files says something else."""
    said: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file in said and piece.numel:
                dtype, sizes = stored(entry.dtype, piece.sizes)
                end = piece.start + piece.numel * entry.dtype.itemsize
                key = key_of(name, piece.offsets, piece.sizes, entry.shape)
                said[piece.file][key] = dtype, list(sizes), piece.start, end
    for file, expected in said.items():
        found = header_of(folder / file)
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
    """Loads the user's objects from their states; returns a function that restores the states that they had."""
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
    """The values that this rank takes, as JSON, each with whether it is this rank's own."""
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
    """Notes whether this rank goes on from saved local steps; if there are some and it does not, notes why."""
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


def load_given(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    found: Match,
    trained: Trained,
    mesh: Mesh,
    together: bool = False,
) -> Work[Callable[[], None]]:
    """Takes what fits of tensors that are given, whole or cut as here, or not read yet; returns a function that writes
    it. For `lockstep`. ``manifest``: says what they are; ``together``: to read one is a work of all ranks."""
    values = chosen_values(manifest, found, {}, mesh.rank, [])
    beside = {name for tree, _ in values.values() for name in tensor_names(tree)}
    wanted = by_name(found.wanted)
    pairs: Pairs = []
    kept: dict[str, torch.Tensor] = {}
    for name, given in tensors.items():
        if not together and name not in beside and name not in wanted:
            continue
        read = getattr(given, "read", None)
        value = given if read is None else read()
        if isinstance(value, Generator):
            value = yield from value
        if name in beside:
            kept[name] = value if read is None else value.cpu()
        for one in wanted.get(name, ()):
            part = one.part_of(value)
            # A copy, so that no more than this rank's own part is held.
            pairs.append((one.values, part if read is None else part.to(one.values.dtype, copy=True)))
    write_values = prepare_values(values, kept, found, trained, "")

    def write_them() -> None:
        write([(to, part) for to, part in pairs if to.data_ptr() != part.data_ptr()])
        write_values()

    return write_them


def prepare_values(
    values: Mapping[str, tuple[Any, bool]],
    tensors: Mapping[str, torch.Tensor],
    found: Match,
    trained: Trained,
    row: str,
) -> Callable[[], None]:
    """Returns a function that writes the values. ``row``: whose batches this rank has, of how many."""
    state = trained.state
    written: Pairs = []
    fresh: dict[str, torch.Tensor] = {}  # tensors that the loss updates, and no program reads yet
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
    write_optimizer = prepare_optimizer(values, tensors, found, trained)
    of_run = "updates" in values  # or of weights or an optimizer alone
    random, own = values.get("random", (None, False))  # a checkpoint that was converted from another format has none
    there = sources(trained.plan.device)  # NumPy may be missing here
    drawn = decode({name: tree for name, tree in random.items() if name in there}, tensors) if own else {}
    if own:
        check_generators(drawn, trained.plan.device)

    def write_them() -> None:
        if trained.local is not None and of_run:
            trained.local.load(decode(values["local"][0], tensors) if found.local else None, state)
        write([*written, *((total, total.new_zeros(())) for total in state.sums.values() if of_run)])
        if of_run:
            state.step_counts.added = frozenset()
        state.constants.update(fresh)
        if of_run or found.options is not None:
            write_optimizer()
        if own:
            set_generators(drawn, state, trained.plan.device)
        elif random is not None:
            derive_generators(f"{digest(random, tensors)} {row}", state, trained.plan.device)

    return write_them


def prepare_optimizer(
    values: Mapping[str, tuple[Any, bool]], tensors: Mapping[str, torch.Tensor], found: Match, trained: Trained
) -> Callable[[], None]:
    """Returns a function that writes what groups keep once, what owners keep, and rates."""
    state = trained.state
    written = [
        _filled(state.optimizer[f"{key}.{name}"], number)
        for key, numbers in found.scalars.items()
        for name, number in numbers.items()
    ]
    owned = {name: decode(values[key][0], tensors) for name, key in found.owned.items() if key in values}
    others = decode(values["owners"][0], tensors) if "owners" in values else []
    groups = [{k: decode(v, {}) for k, v in one.items()} for one in found.options or ()]

    def write_them() -> None:
        state.step_counts.loaded(found.updated)
        write(written)
        for update, one in zip(trained.updates, others, strict=False):
            update.go_on(owned, one)
            update.show(state.optimizer)
        if trained.optimizer is not None and found.options is not None:
            write_groups(trained.optimizer, groups, found.written)

    return write_them


def _filled(to: torch.Tensor, number: float) -> tuple[torch.Tensor, torch.Tensor]:
    return to, torch.full_like(to, number)
