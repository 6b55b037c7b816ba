"""Which program of a launch works where: arithmetic on shapes, strides and addresses, nothing else.

One launch covers many tensors. Its programs are numbered through, piece after piece, and all that a program must know
to find its place is a constant of the compiled kernel; only the tensors' addresses are arguments. So there is no table
to stage through host memory, and a captured launch can be replayed. More than `MOST` tensors are several launches: with
60, every address is held in a register of its own, and 400 take minutes to compile.

    pieces      weight [64, 64]      bias [64]   norm [64]
    programs    0    1    2    3     4           5            # 1,024 elements each

A kernel finds its piece by a binary search over each piece's first program: a tree of branches on constants, with one
body of loads and stores behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

T = TypeVar("T")

VECTOR = 16  # bytes that a thread loads or stores at once, at addresses that are a multiple of it
TILE = 64  # rows and columns that a program transposes: 128 bytes along either of a two-byte type
MOST = 32  # tensors of a launch
NARROW = 16  # a transposed matrix with fewer rows or columns is read element by element


@dataclass(frozen=True)
class Group:
    """Pieces that the same code copies; the constants of that code.

    Piece ``i`` fills ``[offsets[i], stops[i])`` of the flat buffer, ``sizes[i]`` elements from its source and zeros
    from there on, by the programs ``[starts[i], starts[i + 1])``. ``shape`` and ``stride`` are those of the one
    source, with dims that can be walked as one joined; empty where the sources are contiguous. ``tile``: which of the
    dims is the fastest in the source, where that is another than in the buffer and both are worth a tile; else -1.
    """

    DERIVED: ClassVar = ("count", "wide", "places", "outer")

    starts: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stops: tuple[int, ...]
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    tile: int = -1

    @property
    def wide(self) -> bool:
        """Whether places in the one source, or their number, need 64 bits."""
        reach = sum((size - 1) * abs(step) for size, step in zip(self.shape, self.stride))
        return max(reach, *self.sizes, *(stop - offset for stop, offset in zip(self.stops, self.offsets))) >= 2**31

    @property
    def count(self) -> int:
        return len(self.offsets)

    @property
    def places(self) -> tuple[int, ...]:
        """The strides of the one source's dims in the flat buffer."""
        return contiguous(self.shape)

    @property
    def outer(self) -> tuple[int, ...]:
        """The dims that a tile does not span."""
        return tuple(dim for dim in range(len(self.shape) - 1) if dim != self.tile)


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def joined(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in the same order with as few dims as can be: ``(2, 3, 4), (12, 4, 1)`` -> ``(24,), (1,)``."""
    found: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == step * size:
            found[-1] = (found[-1][0] * size, step)
        else:
            found.append((size, step))
    return tuple(size for size, _ in found), tuple(step for _, step in found)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """``(2, 3)`` -> ``(3, 1)``."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def tile_dim(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The source's fastest dim where a tile should span it and the last one, or -1."""
    last = len(shape) - 1
    for dim in range(last):
        if stride[dim] == 1 and stride[last] != 1 and min(shape[dim], shape[last]) >= NARROW:
            return dim
    return -1


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % VECTOR == 0


Member = tuple[torch.Tensor, int, int, int]  # a source, where it goes, how much it has, how far it fills
Part = tuple[tuple[Group, ...], tuple[tuple[torch.Tensor, ...], ...], int]


def flat_groups(
    sources: Sequence[torch.Tensor], offsets: Sequence[int], out: torch.Tensor, block: int, kept: Sequence[int] = ()
) -> list[Part]:
    """What fills ``out``, by launch: groups, the sources of each, and the number of programs.

    ``sources[i]`` goes to ``offsets[i]``, which ascend; everything between and behind is zero, but for what is
    ``kept``: stretches of ``out``, first and last + 1 of each, that hold what they should. Contiguous sources
    of one dtype share a group, and with it vector loads; a source whose address or place is not aligned goes to
    another, so that it does not narrow theirs. Others are a group each, compiled for their strides.
    """
    ends = [offset + source.numel() for source, offset in zip(sources, offsets, strict=True)]
    known = [*zip(offsets, ends, sources, strict=True), *((*pair, None) for pair in zip(kept[::2], kept[1::2]))]
    taken = sorted(((start, end, source) for start, end, source in known if end > start), key=lambda one: one[0])
    bounds = [*(start for start, _, _ in taken), out.numel()]
    pieces: dict[object, list[Member]] = {}

    def add(source: torch.Tensor, offset: int, size: int, stop: int, key: object) -> None:
        if stop > offset:
            aligned = is_aligned(source) and offset * out.element_size() % VECTOR == 0
            pieces.setdefault((source.dtype, aligned) if key is None else key, []).append((source, offset, size, stop))

    add(out, 0, 0, bounds[0], None)  # nothing is read from a source of size 0: `out` stands in for one
    for index, ((offset, end, source), bound) in enumerate(zip(taken, bounds[1:], strict=True)):
        if source is None:
            add(out, end, 0, bound, None)
            continue
        shape, stride = joined(source.shape, source.stride())
        plain = stride in ((), (1,))
        tiled = tile_dim(shape, stride) >= 0
        add(source, offset, source.numel(), end if tiled else bound, None if plain else index)
        if tiled:
            add(out, end, 0, bound, None)
    batches: list[list[list[Member]]] = []
    for members in pieces.values():
        for some in in_turns(members):
            if not batches or sum(map(len, batches[-1])) + len(some) > MOST:
                batches.append([])
            batches[-1].append(some)
    return [_grouped(batch, block) for batch in batches]


def _grouped(batch: Sequence[Sequence[Member]], block: int) -> Part:
    groups, tensors, program = [], [], 0
    for members in batch:
        shape, stride = joined(members[0][0].shape, members[0][0].stride()) if members[0][2] else ((), ())
        if stride in ((), (1,)):
            shape, stride = (), ()
        tile = tile_dim(shape, stride)
        starts = [program]
        for _, offset, _, stop in members:
            if tile >= 0:
                rest = math.prod(shape) // shape[tile] // shape[-1]
                program += rest * ceil_div(shape[tile], TILE) * ceil_div(shape[-1], TILE)
            else:
                program += ceil_div(stop - offset, block)
            starts.append(program)
        places, sizes, stops = (tuple(member[column] for member in members) for column in (1, 2, 3))
        groups.append(Group(tuple(starts), places, sizes, stops, shape, stride, tile))
        tensors.append(tuple(source for source, *_ in members))
    return tuple(groups), tuple(tensors), program


def list_group(sizes: Sequence[int], block: int, offsets: Sequence[int] = ()) -> Group:
    """The programs of tensors that are read and written in place; ``offsets``: each one's first program's number in
    what the programs return."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + ceil_div(size, block))
    return Group(tuple(starts), tuple(offsets) or tuple(starts[:-1]), tuple(sizes), tuple(sizes))


def by_dtype(*lists: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places in parallel lists that one launch can work on: not empty, of the same dtypes, no more than `MOST`."""
    found: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, row in enumerate(zip(*(tensors for tensors in lists if tensors), strict=True)):
        if row[0].numel():
            found.setdefault(tuple(tensor.dtype for tensor in row), []).append(index)
    return [some for places in found.values() for some in in_turns(places)]


def in_turns(items: list[T]) -> list[list[T]]:
    """No more than `MOST` at a time."""
    return [items[begin : begin + MOST] for begin in range(0, len(items), MOST)]
