"""A rank reads the blocks of the files in which its own elements are, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compiled import Policy
from fsdp_compiled.distributed.mesh import Mesh, lockstep
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint import data_file, loading
from fsdp_compiled.runtime.checkpoint.chunks import Chunk, Place, held, overlap
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from tests.saved_plans import CPU, RULES, places, save, shards, values

BLOCK = 256
LEAVES = [Leaf((f"p{index}",), (67, 33), (33, 1), torch.float32, True, 0, "") for index in range(4)]


def plan(world: int, shard: str = "zero3") -> Plan:
    return make_plan(LEAVES, Policy(lower="eager", shard=shard), CPU, world, 1, 1)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Manifest, list[tuple[str, int, int]]]:
    """What four ranks wrote; and what is read, as it is: file, offset, bytes."""
    for module in (data_file, loading):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    read: list[tuple[str, int, int]] = []
    fill = data_file.Reader._fill

    def count(self: Any, file: Any, start: int, into: memoryview) -> None:
        read.append((self._path.name, start, len(into)))
        fill(self, file, start, into)

    monkeypatch.setattr(data_file.Reader, "_fill", count)
    return tmp_path, save(plan(4), values(LEAVES), tmp_path), read


def load(folder: Path, manifest: Manifest, new: Plan, place: Place) -> Sequence[Chunk]:
    parameters, optimizer = shards(new, place, None)
    wanted = list(held(new, RULES, place, parameters, optimizer))
    work = loading.read(folder, manifest, Mesh(CPU), wanted, [], rest=False)
    loading.write(lockstep(Mesh(CPU), "it", work)[0])
    expected = shards(new, place, values(LEAVES))
    for made, right in zip((parameters, optimizer), expected, strict=True):
        assert all(torch.equal(made[key], right[key]) for key in made)
    return wanted


def blocks_of(manifest: Manifest, wanted: Sequence[Chunk]) -> set[tuple[str, int]]:
    """The blocks in which any of these elements is, one element at a time."""
    found = set()
    for one in wanted:
        for piece in manifest.tensors[one.name].pieces:
            common = overlap(one.offsets, tuple(one.values.shape), piece.offsets, piece.sizes)
            for row, column in itertools.product(*map(range, *common)) if common is not None else ():
                element = (row - piece.offsets[0]) * piece.sizes[1] + column - piece.offsets[1]
                found.add((piece.file, (piece.start + 4 * element) // BLOCK))
    return found


def test_two_ranks_read_half_each_of_what_four_wrote(saved: Any) -> None:
    folder, manifest, read = saved
    total = sum(file.size for file in manifest.files.values())
    of_ranks = []
    for place in places(plan(2)):
        read.clear()
        wanted = load(folder, manifest, plan(2), place)
        assert {(name, start // BLOCK) for name, start, _ in read} == blocks_of(manifest, wanted)
        assert len(read) == len(set(read)), "no block is read twice"
        of_ranks.append(sum(size for *_, size in read))
    edges = 2 * BLOCK * (len(LEAVES) * 3 + len(manifest.files))  # blocks that are in part another's
    assert all(total / 2 - edges < size < total / 2 + edges for size in of_ranks) and edges < total / 4


def test_the_control_a_rank_that_holds_all_reads_all(saved: Any) -> None:
    folder, manifest, read = saved
    load(folder, manifest, plan(1), Place())
    everything = {(name, start) for file in manifest.files.values() for name, start in _blocks(file)}
    headers = {(file.name, start) for file in manifest.files.values() for _, start in _blocks(file)[:20]}
    missed = everything - {(name, start) for name, start, _ in read}
    assert missed <= headers and len(missed) < len(everything) / 10


def _blocks(file: data_file.Item | Any) -> list[tuple[str, int]]:
    return [(file.name, start) for start in range(0, file.size, BLOCK)]
