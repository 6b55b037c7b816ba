"""What one rank writes: its files as they will be, in host memory, so that the step need not wait for the disk.

    stretches and values  ->  names and offsets in files (`Plans`)  ->  one copy into the image (`fill`)  ->  files

The image is kept for the next checkpoint: fresh memory costs as much as the copy. What a load reads of a rank's shards
stands in the same memory until it is verified.

What this rank writes of the flat shards is found at the first save, and again only when what it depends on is another:
the plan, the optimizer's rules, who else holds the same elements, and where in memory the shards are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_compiled.runtime.checkpoint.contents import Trained
from fsdp_compiled.runtime.checkpoint.data_file import ALIGNMENT, Item, Layout, lay_out, memory_of, packed
from fsdp_compiled.runtime.checkpoint.manifest import Entry
from fsdp_compiled.runtime.checkpoint.stretches import Holders, Stretch, aliases, held, tensors

FILE = 4 << 30  # bytes: a file is closed when it has as many


@dataclass(frozen=True)
class Arranged:
    """One file of this rank's. ``runs``: what is copied where in it, as `runs` says."""

    name: str
    layout: Layout
    parts: Sequence[Stretch]
    runs: Sequence[tuple[int, torch.Tensor]]


def arrange(parts: Sequence[Stretch], rank: int, world: int) -> list[Arranged]:
    """The files, with everything's place in them."""
    rows = packed(parts, lambda one: one.values.numel() * one.values.itemsize, FILE)
    found = []
    for index, row in enumerate(rows):
        layout = lay_out(map(_item, row))
        more = f"-{index:05d}" if index else ""
        name = f"shard-{rank:05d}-of-{world:05d}{more}.safetensors"
        found.append(Arranged(name, layout, row, list(runs(row, layout))))
    return found


def _item(one: Stretch) -> Item:
    in_shape = one.whole and list(one.order) == sorted(one.order)
    return Item(one.key, one.values.dtype, one.shape if in_shape else (one.values.numel(),))


@dataclass(frozen=True)
class Shards:
    """``entries``: of all ranks together, without pieces; ``parts``: what this rank writes of them."""

    entries: Mapping[str, Entry]
    parts: Sequence[Stretch]
    aliases: Mapping[str, str]


class Plans:
    """What is the same at each save as long as what is saved is: which elements, and where in which file."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._by: tuple[object, ...] = ()  # what is compared by identity, kept so that it stays one
        self._shards: Shards | None = None
        self._alike: object = None  # what the files hold beside them
        self._files: Sequence[Arranged] = ()  # with the runs of the shards alone

    def find(self, trained: Trained, holders: Holders) -> Shards:
        plan, state, rules = trained.plan, trained.state, trained.rules
        by = (plan, *rules)
        of = (holders, _memory(trained.weights), _memory(state.optimizer))
        alike = len(by) == len(self._by) and all(one is other for one, other in zip(by, self._by))
        if self._shards is None or not alike or of != self._of:
            place = holders.places[holders.rank]
            parts = list(held(plan, rules, place, trained.weights, state.optimizer, holders))
            self._shards = Shards(tensors(plan, rules, state.optimizer), parts, aliases(plan))
            self._by, self._of, self._alike = by, of, None
        return self._shards

    def arrange(self, extra: Sequence[Stretch], rank: int, world: int) -> Sequence[Arranged]:
        """This rank's files, of what `find` found last and ``extra``, whose values lie elsewhere at each save."""
        assert self._shards is not None
        alike = [(one.key, one.values.dtype, one.values.shape) for one in extra], FILE
        fresh = {one.key: one for one in extra}
        if alike != self._alike:
            self._alike, self._files = alike, [
                replace(
                    file,
                    parts=[replace(p, values=p.values.new_empty(0)) if p.key in fresh else p for p in file.parts],
                    runs=list(runs([p for p in file.parts if p.key not in fresh], file.layout)),
                )
                for file in arrange([*self._shards.parts, *extra], rank, world)
            ]  # fmt: skip
        found = []
        for file in self._files:
            own = [fresh[one.key] for one in file.parts if one.key in fresh]
            row = [fresh.get(one.key, one) for one in file.parts]
            found.append(replace(file, parts=row, runs=[*file.runs, *runs(own, file.layout)]))
        return found


class Image:
    """Host memory for the files, pinned where a GPU copies into it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []

    def room(self) -> Callable[[int, torch.dtype], torch.Tensor]:
        """Gives memory for so many elements, of the image's as long as there is some. Until the next call or `fill`."""
        files = [0] * len(self._memory)

        def take(numel: int, dtype: torch.dtype) -> torch.Tensor:
            size = numel * dtype.itemsize
            for index, memory in enumerate(self._memory):
                start = -(-files[index] // ALIGNMENT) * ALIGNMENT
                if start + size <= memory.numel():
                    files[index] = start + size
                    return memory[start : start + size].view(dtype)
            return torch.empty(numel, dtype=dtype)

        return take

    def fill(self, files: Sequence[Arranged]) -> list[memoryview]:
        """Copies everything; returns, by file, its bytes. They are the image's until the next call."""
        cuda = self._device.type == "cuda"
        for index, file in enumerate(files):
            if index == len(self._memory):
                self._memory.append(torch.empty(0, dtype=torch.uint8))
            if self._memory[index].numel() < file.layout.size:
                self._memory[index] = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
                self._memory[index] = torch.empty(file.layout.size, dtype=torch.uint8, pin_memory=cuda)
        with torch.no_grad():
            for memory, file in zip(self._memory, files):
                memory_of(memory)[: len(file.layout.header)] = file.layout.header
                for start, values in file.runs:
                    place = memory[start : start + values.numel() * values.itemsize]
                    place.view(values.dtype).copy_(values, non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize(self._device)
        return [memory_of(memory)[: file.layout.size] for memory, file in zip(self._memory, files)]


def runs(parts: Sequence[Stretch], layout: Layout) -> Iterator[tuple[int, torch.Tensor]]:
    """Where in the file what goes, 1-d: parts that follow each other in memory and in the file as one, a single copy.

    Of a flat buffer these are nearly all. One copy of many MiB costs less than many of one.
    """
    rows: list[list[torch.Tensor]] = []
    ends: tuple[torch.dtype, int, int, int] | None = None  # dtype and storage, address and offset where the last ended
    starts: list[int] = []
    for one in sorted(parts, key=lambda one: layout.offsets[one.key]):
        values = one.values.detach().reshape(-1)
        size, start = values.numel() * values.itemsize, layout.offsets[one.key]
        if not size:
            continue
        at = values.dtype, values.untyped_storage().data_ptr(), values.data_ptr(), start
        if at != ends:
            rows.append([])
            starts.append(start)
        rows[-1].append(values)
        ends = at[0], at[1], at[2] + size, start + size
    for start, row in zip(starts, rows):
        first = row[0]
        yield start, first.as_strided((sum(one.numel() for one in row),), (1,)) if len(row) > 1 else first


def described(files: Sequence[Arranged], checksums: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What the manifest has to say of this rank's files, as JSON."""
    return {
        "files": [
            {"name": file.name, "size": file.layout.size, "checksums": list(found)}
            for file, found in zip(files, checksums, strict=True)
        ],
        "pieces": [
            [one.name, one.start, one.stop, index, file.layout.offsets[one.key], *(one.cut or ())]
            for index, file in enumerate(files)
            for one in file.parts
        ],
    }


def _memory(shards: Mapping[str, torch.Tensor]) -> list[tuple[object, ...]]:
    """Where each lies. What was found holds views of them, so no other comes to the same place."""
    return [(name, one.data_ptr(), one.dtype, one.shape, one.stride()) for name, one in shards.items()]
