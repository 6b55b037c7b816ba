"""Parts of parameters, which every rank has, to the rank that owns each, and back: one message each way.

    rank 0 has  aaa bb        to owners        rank 0, who owns a:  aaa AAA
    rank 1 has  AAA BBB       ------------->   rank 1, who owns b:  bb BBB
                              <-------------
                              back

An all-to-all of bytes along the shard axis, whatever the dtypes; what a rank has for itself is not copied into it. Each
message begins with a word: a number that says how its sender is, for all to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fsdp_compiled.distributed.mesh import Mesh

WORD = 16  # bytes: what everything in a message is a multiple of, so that any dtype is aligned


@dataclass(frozen=True)
class Owned:
    """One tensor: who owns it, and the elements ``[first, last)`` of it that each rank along the shard axis has."""

    owner: int
    parts: tuple[tuple[int, int], ...]  # by rank, in order, without gaps
    dtype: torch.dtype

    def nbytes(self, rank: int) -> int:
        first, last = self.parts[rank]
        return (last - first) * self.dtype.itemsize

    @property
    def numel(self) -> int:
        return self.parts[-1][1]


def to_owners(rows: Sequence[Owned], own: Sequence[torch.Tensor], mesh: Mesh) -> list[torch.Tensor | None]:
    """``own``: of each row, this rank's part, 1-d. Returns the whole of what this rank owns, 1-d. Collective.

    What this rank has all of is returned itself, other wholes are new tensors.
    """
    me, ranks = mesh.shard_rank, range(mesh.shard)
    sent = [[value for row, value in zip(rows, own, strict=True) if row.owner == rank] for rank in ranks]
    mine = [row for row in rows if row.owner == me]
    got, _ = _exchange(sent, [[(row.nbytes(rank), row.dtype) for row in mine] for rank in ranks], 0, mesh)
    wholes = map(_joined, zip(*got, strict=True))
    return [next(wholes) if row.owner == me else None for row in rows]


def to_parts(
    rows: Sequence[Owned], whole: Sequence[torch.Tensor | None], word: int, mesh: Mesh
) -> tuple[list[torch.Tensor], list[int]]:
    """``whole``: of each row that this rank owns, all of it, 1-d. Returns this rank's part of every row, and the
    ``word`` (below 2**63) of each rank along the shard axis. Collective."""
    me, ranks = mesh.shard_rank, range(mesh.shard)
    owned = [(row, value) for row, value in zip(rows, whole, strict=True) if row.owner == me]
    sent = [[value[slice(*row.parts[rank])] for row, value in owned if value is not None] for rank in ranks]
    sizes = [[(row.nbytes(me), row.dtype) for row in rows if row.owner == rank] for rank in ranks]
    got, words = _exchange(sent, sizes, word, mesh)
    parts = [iter(one) for one in got]
    return [next(parts[row.owner]) for row in rows], words


def _exchange(
    sent: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[tuple[int, torch.dtype]]], word: int, mesh: Mesh
) -> tuple[list[Sequence[torch.Tensor]], list[int]]:
    """Sends each other rank these tensors; what each rank sent, of these sizes in bytes, and each rank's word.

    What this rank has for itself stays where it is.
    """
    me = mesh.shard_rank
    lengths = [WORD + sum(_padded(value.numel() * value.itemsize) for value in row) for row in sent]
    coming = [WORD + sum(_padded(nbytes) for nbytes, _ in row) for row in sizes]
    lengths[me] = coming[me] = 0
    message = torch.empty(sum(lengths), dtype=torch.uint8, device=mesh.device)
    place = 0
    for rank, row in enumerate(sent):
        if rank == me:
            continue
        message[place : place + WORD].view(torch.int64).fill_(word)
        place += WORD
        for value in row:
            if nbytes := value.numel() * value.itemsize:
                message[place : place + nbytes].view(value.dtype).copy_(value)
                place += _padded(nbytes)
    collectives = torch.ops._c10d_functional
    received = collectives.wait_tensor(
        collectives.all_to_all_single(message, coming, lengths, mesh.groups["shard"])
    )  # fmt: skip
    found: list[Sequence[torch.Tensor]] = []
    words = []
    place = 0
    for rank, row_sizes in enumerate(sizes):
        if rank == me:
            found.append(sent[me])
            continue
        words.append(received[place : place + WORD].view(torch.int64)[0])
        place += WORD
        parts = []
        for nbytes, dtype in row_sizes:
            parts.append(received[place : place + nbytes].view(dtype) if nbytes else _none(dtype, mesh.device))
            place += _padded(nbytes)
        found.append(parts)
    others = torch.stack(words).tolist()
    return found, [*others[:me], word, *others[me:]]


@cache
def _none(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    filled = [part for part in parts if part.numel()]
    return filled[0] if len(filled) == 1 else torch.cat(list(parts))


def _padded(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD
