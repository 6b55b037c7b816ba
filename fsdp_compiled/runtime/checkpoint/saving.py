"""What all ranks do together to save: agree, divide the work, and copy; the rest goes on in the background.

every rank   values and their digests -+- exchange ->  who writes which value  ->  copy into the image  ->  thread
rank 0       the folder aside         -+

They meet once. What each does after that follows from what all have said, so that it is refused on all ranks or on
none; where a rank cannot copy all the same, it says so where it would say what it has written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.distributed.lockstep import Exchange, Last
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint.contents import OWNED, Trained
from fsdp_compiled.runtime.checkpoint.data_file import check_dtype
from fsdp_compiled.runtime.checkpoint.image import Plans
from fsdp_compiled.runtime.checkpoint.manifest import Entry
from fsdp_compiled.runtime.checkpoint.stretches import Holders, Stretch, place_of
from fsdp_compiled.runtime.checkpoint.values import Tensors, digest, renamed, tensor_names
from fsdp_compiled.runtime.checkpoint.writing import Save, Written

ALIKE = ("updates", "scale", "optimizer", "scalars", "owners")  # values that ranks cannot differ in


@dataclass(frozen=True)
class Wish:
    """What is to be saved where, as the user said it."""

    folder: Path
    step: int
    keep: int | None
    replace: bool

    def __str__(self) -> str:
        return f"{self.folder}, step {self.step}, keep={self.keep}, replace={self.replace}"


Divide = Callable[[list[Any]], tuple[Save, Written]]


def prepare(
    wish: Wish,
    number: int,
    mesh: Mesh,
    trained: Trained,
    values: Mapping[str, Any],
    found: Tensors,
    plans: Plans,
    begun: list[Path],
    dealt: Sequence[str] = (),
) -> Last:
    """What this rank says last, whose answers the function that goes with it divides the work by.

    ``begun``: gets the folder that rank 0 made, which has to go if a rank fails. ``dealt``: values that are each rank's
    own, also where they are equal.
    """
    aside: Path | None = None
    if mesh.rank == 0:
        aside = folders.begin(wish.folder, wish.step, wish.replace)
        begun.append(aside)
    for name, tensor in found.items():
        check_dtype(name, tensor.dtype)
    digests = {
        name: f"{digest(tree, found)}{f' of {row_of(mesh)}' if name in dealt else ''}" for name, tree in values.items()
    }
    place = place_of(mesh)

    def divide(said: list[Any]) -> tuple[Save, Written]:
        """As all ranks do; which parts of which files this one writes."""
        rows = [row for _, _, row, _ in said]
        writers = _writers([digests for *_, digests in said], rows)
        holders = Holders(mesh.rank, [place for _, place, *_ in said])
        own = plans.find(trained, holders)
        trees, extra, entries = _own_values(mesh.rank, writers, values, found)
        files = plans.arrange(extra, mesh.rank, mesh.world)
        written_by = {"torch": str(torch.__version__), "shard": trained.plan.policy.shard, "id": said[0][0].name}
        save = Save(
            number, said[0][0], wish.step, wish.keep, mesh.world, own.entries, own.aliases, writers, written_by, rows,
            wish.replace,
        )  # fmt: skip
        return save, Written(files, trees, entries)

    return Last(divide, Exchange("what they save", (aside, place, row_of(mesh), digests)))


def row_of(mesh: Mesh) -> int:
    """Whose batches this rank has: ranks along tp have the same."""
    return mesh.row if mesh.tp > 1 else mesh.rank


def _writers(digests: list[dict[str, str]], rows: Sequence[int]) -> dict[str, list[int]]:
    """Who writes each value: one rank, in turn, where all have the same; else for each rank, which one.

    That is the first with the same batches (``rows``), where those have the same, or each itself.
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
) -> tuple[dict[str, Any], list[Stretch], dict[str, Entry]]:
    """The values that this rank writes: as JSON, and their tensors."""
    trees: dict[str, Any] = {}
    parts: list[Stretch] = []
    entries: dict[str, Entry] = {}
    for name, ranks in writers.items():
        if rank not in ranks:
            continue
        suffix = f" of rank {rank}" if len(ranks) > 1 else ""
        trees[name] = renamed(values[name], lambda key, suffix=suffix: key + suffix)  # type: ignore[misc]
        for key in tensor_names(values[name]):
            value = found[key]
            shape = tuple(value.shape)
            entries[key + suffix] = Entry(shape, value.dtype, tuple(range(len(shape))))
            parts.append(Stretch(key + suffix, 0, value.numel(), value, shape, entries[key + suffix].order))
    return trees, parts, entries
