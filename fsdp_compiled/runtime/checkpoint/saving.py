"""What all ranks do together to save: agree, divide the work, and copy; the rest goes on in the background.

every rank   values and their digests -+- exchange ->  who writes what -+- all can ->  copy into the image  ->  thread
rank 0       the folder aside         -+                                -+

What each does follows from what all have said. Before they copy they meet again: a save is refused on all ranks or on
none. A rank that then cannot copy says so in place of what it has written.

    chunks and values  ->  names and offsets in files (`Plans`)  ->  one copy into the image (`fill`)  ->  files

The image is kept for the next checkpoint, since fresh memory costs as much as the copy. A rank finds out what it writes
of the flat shards at the first save. It does so again only if something changes that this depends on: the plan, the
optimizer's rules, the other ranks that hold the same elements, and the shards' addresses in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from fsdp_compiled.distributed.mesh import Exchange, Mesh, Work
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint.chunks import Chunk, Entry, Holders, aliases, held, place_of, tensors, whole_chunk
from fsdp_compiled.runtime.checkpoint.contents import OWNED, Trained, dealt_out, values_of
from fsdp_compiled.runtime.checkpoint.data_file import Layout, check_dtype, lay_out, memory_of, packed
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.values import Tensors, digest, renamed, tensor_names

T = TypeVar("T")
ALIKE = ("updates", "scale", "optimizer", "scalars", "owners")  # values that must be the same on all ranks
FILE = 4 << 30  # bytes: a file is closed when it has as many


@dataclass(frozen=True)
class Wish:
    """What is to be saved where, as the user said it."""

    folder: Path
    step: int
    keep: int | None
    replace: bool

    def __str__(self) -> str:
        return f"{self.folder}, step {self.step}, keep={self.keep}, replace={self.replace}"


def check_wish(folder: Any, step: Any, keep: Any, replace: Any) -> Wish:
    """Raises ``ValueError`` for arguments that make no sense."""
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name} is {value!r}; expected a whole number of {least} or more, or None.")
    return Wish(path(folder), step, keep, bool(replace))


def path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder is a {type(folder).__name__}; expected a path.")
    if not str(folder) or "\0" in str(folder):
        raise ValueError(f"folder is {str(folder)!r}; expected a path. The folder one is in is '.'.")
    return Path(folder).absolute()


@dataclass(frozen=True)
class Save:
    """What all ranks know of a checkpoint that is being written. ``head``: its manifest without pieces and values."""

    number: int  # counts this `Sharded`'s saves
    aside: Path
    keep: int | None
    replace: bool
    head: Manifest
    writers: Mapping[str, list[int]]  # for each value: one rank for all, or for each rank the one that writes its value

    @property
    def what(self) -> str:
        return f"the checkpoint of step {self.head.step} in {self.aside.parent}"

    def key(self, what: str) -> str:
        """Where ranks say this of it, on the store."""
        return f"save/{self.number}/{what}"


@dataclass(frozen=True)
class Arranged:
    """One of this rank's files. ``shards``: the chunks of flat shards in it."""

    name: str
    layout: Layout
    shards: Sequence[Chunk]

    def places(self, chunks: Sequence[Chunk]) -> list[tuple[int, Chunk]]:
        """Those of the chunks that are in this file, each with its first byte."""
        return [(self.layout.offsets[one.key], one) for one in chunks if one.key in self.layout.offsets]


@dataclass(frozen=True)
class Written:
    """What this rank writes. ``values``: JSON; ``beside``: its tensors, beside shards."""

    files: Sequence[Arranged]
    values: Mapping[str, Any]
    beside: Sequence[Chunk]


def prepare(
    wish: Wish, number: int, mesh: Mesh, trained: Trained, extra: Mapping[str, Any], plans: Plans, begun: list[Path]
) -> Work[tuple[Save, Written]]:
    """Divides the work as all ranks do; returns which parts of which files this rank writes. For `lockstep`.

    ``begun``: receives the folder that rank 0 made, which has to go if a rank fails.
    """
    values, found = values_of(trained, extra)
    aside: Path | None = None
    if mesh.rank == 0:
        aside = folders.begin(wish.folder, wish.step, wish.replace)
        begun.append(aside)
    for name, tensor in found.items():
        check_dtype(name, tensor.dtype)
    # The state of a loader that deals examples out is each rank's own, even if it is equal.
    dealt = [f"extra {name}" for name, holder in extra.items() if dealt_out(holder)]
    digests = {
        name: f"{digest(tree, found)}{f' of {row_of(mesh)}' if name in dealt else ''}" for name, tree in values.items()
    }
    said = yield Exchange("what they save", (aside, place_of(mesh), row_of(mesh), digests))
    folder: Path = said[0][0]
    rows = [row for _, _, row, _ in said]
    writers = _writers([digests for *_, digests in said], rows)
    plan, rules, optimizer = trained.plan, trained.rules, trained.state.optimizer
    holders = Holders(mesh.rank, [place for _, place, *_ in said])
    by = (plan, *rules)  # compared by identity, and held beside the chunks, so that they keep it
    of = [*map(id, by)], holders, _memory(trained.weights), _memory(optimizer)

    def find() -> tuple[list[Chunk], dict[str, Entry], object]:
        chunks = held(plan, rules, place_of(mesh), trained.weights, optimizer, holders)
        return list(chunks), tensors(plan, rules, optimizer), by

    shards, entries, _ = plans.again("chunks", of, find)
    trees, beside = _own_values(mesh.rank, writers, values, found)
    alike = of, [(one.key, one.values.dtype, one.values.shape) for one in beside], FILE
    files = plans.again("files", alike, lambda: arrange(shards, beside, mesh.rank, mesh.world))
    written_by = {"torch": str(torch.__version__), "shard": plan.policy.shard, "id": folder.name}
    head = Manifest(wish.step, mesh.world, entries, {}, aliases(plan), {}, written_by, rows)
    save = Save(number, folder, wish.keep, wish.replace, head, writers)
    return save, Written(files, trees, beside)


def row_of(mesh: Mesh) -> int:
    """Whose batches this rank has: ranks along tp have the same."""
    return mesh.row if mesh.tp > 1 else mesh.rank


def _writers(digests: list[dict[str, str]], rows: Sequence[int]) -> dict[str, list[int]]:
    """Who writes each value: one rank, in turn, if all have the same; otherwise, for each rank, the writer of its
    value.

    That is the first rank with the same batches (``rows``) if such ranks have the same value, or else itself.
    """
    names = list(dict.fromkeys(name for one in digests for name in one))
    found = {}
    for index, name in enumerate(names):
        different = {one.get(name) for one in digests}
        if name.startswith(OWNED):
            holders = [rank for rank, one in enumerate(digests) if name in one]
            if len(different - {None}) > 1:
                raise ValueError(f"the optimizer's state of {name.removeprefix(OWNED)} differs between its owners.")
            found[name] = [holders[index % len(holders)]]
            continue
        if None in different:
            missing = next(rank for rank, one in enumerate(digests) if name not in one)
            raise ValueError(f"rank {missing} has no {name}, and other ranks have. Give every rank the same to save.")
        if name in ALIKE and len(different) > 1:
            raise ValueError(f"{name} is not the same on all ranks, as it has to be while one trains.")
        if len(different) == 1:
            found[name] = [index % len(digests)]
            continue
        firsts = [rows.index(row) for row in rows]
        by_row = all(one[name] == digests[first][name] for one, first in zip(digests, firsts, strict=True))
        found[name] = firsts if by_row else list(range(len(digests)))
    return found


def _own_values(
    rank: int, writers: Mapping[str, list[int]], values: Mapping[str, Any], found: Tensors
) -> tuple[dict[str, Any], list[Chunk]]:
    """The values that this rank writes: as JSON, and their tensors."""
    trees: dict[str, Any] = {}
    parts: list[Chunk] = []
    for name, ranks in writers.items():
        if rank not in ranks:
            continue
        suffix = f" of rank {rank}" if len(ranks) > 1 else ""
        trees[name] = renamed(values[name], lambda key, suffix=suffix: key + suffix)  # type: ignore[misc]
        parts += [whole_chunk(key + suffix, found[key]) for key in tensor_names(values[name])]
    return trees, parts


def arrange(shards: Sequence[Chunk], beside: Sequence[Chunk], rank: int, world: int) -> list[Arranged]:
    """This rank's files, with the place of everything in them."""
    of_shards = {one.key: one for one in shards}
    tensors: dict[str, torch.Tensor] = {}
    for one in (*shards, *beside):
        if one.key in tensors:
            raise ValueError(f"Two tensors of one file are called {one.key}.")
        tensors[one.key] = one.values
    found = []
    for index, row in enumerate(packed(tensors, FILE)):
        name = f"shard-{rank:05d}-of-{world:05d}{f'-{index:05d}' if index else ''}.safetensors"
        found.append(Arranged(name, lay_out(row), [of_shards[key] for key in row if key in of_shards]))
    return found


class Plans:
    """What is the same at each save, as long as what it depends on stays the same: which elements a rank writes, and
    where in which file."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[object, Any]] = {}

    def again(self, what: str, of: object, find: Callable[[], T]) -> T:
        """What was found before, or is found anew if ``of``, which it depends on, is another."""
        if what not in self._found or self._found[what][0] != of:
            self._found[what] = of, find()
        return cast(T, self._found[what][1])


def _memory(shards: Mapping[str, torch.Tensor]) -> list[tuple[object, ...]]:
    """Each shard's address in memory. Found chunks hold views of the shards, so no other tensor gets the address."""
    return [(name, one.data_ptr(), one.dtype, one.shape, one.stride()) for name, one in shards.items()]


class Image:
    """Host memory for the files, pinned where a GPU copies into it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._files: Sequence[Arranged] = ()
        self._shards: list[tuple[torch.Tensor, torch.Tensor]] = []  # for these files: target and values

    def fill(self, files: Sequence[Arranged], beside: Sequence[Chunk]) -> list[memoryview]:
        """Copies everything; returns the bytes of each file. They belong to the image until the next call."""
        cuda = self._device.type == "cuda"
        if files is not self._files:
            self._files, shards = (), []
            for index, file in enumerate(files):
                if index == len(self._memory):
                    self._memory.append(torch.empty(0, dtype=torch.uint8))
                if self._memory[index].numel() < file.layout.size:
                    self._memory[index] = torch.empty(0, dtype=torch.uint8)  # frees the old memory before the new comes
                    self._memory[index] = torch.empty(file.layout.size, dtype=torch.uint8, pin_memory=cuda)
                shards += _copies(self._memory[index], file, file.shards)
            self._files, self._shards = files, shards
        others = [pair for memory, file in zip(self._memory, files) for pair in _copies(memory, file, beside)]
        with torch.no_grad():
            for memory, file in zip(self._memory, files):
                memory_of(memory)[: len(file.layout.header)] = file.layout.header
            for to, values in (*self._shards, *others):
                to.copy_(values, non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize(self._device)
        return [memory_of(memory)[: file.layout.size] for memory, file in zip(self._memory, files)]


def _copies(memory: torch.Tensor, file: Arranged, chunks: Sequence[Chunk]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies into a file's memory: target and values."""
    return [
        (memory[start : start + one.values.nbytes].view(one.values.dtype).view(one.values.shape), one.values)
        for start, one in file.places(chunks)
    ]
