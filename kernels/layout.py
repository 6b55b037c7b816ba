"""Which program of a launch works where: arithmetic on shapes, strides and addresses, nothing else.

One launch covers many tensors. Its programs are numbered through, piece after piece, and all that a program must know
to find its place is a constant of the compiled kernel; only the tensors' addresses are arguments. So there is no table
to stage through host memory, and a captured launch can be replayed. More than `MOST` tensors are several launches: with
60, every address is held in a register of its own, and 400 take minutes to compile.

    pieces      weight [64, 64]      bias [64]   norm [64]
    programs    0    1    2    3     4           5            # 1,024 elements each

A kernel finds its piece by a binary search over each piece's first program: a tree of branches on constants, with one
body of loads and stores behind it.

What is planned depends on the tensors' form alone, so it is planned once and found again by it at every later call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import ClassVar, NamedTuple, TypeVar

import torch

T = TypeVar("T")

VECTOR = 16  # bytes that a thread loads or stores at once, at addresses that are a multiple of it
TILE = 64  # rows and columns that a program transposes: 128 bytes along either of a two-byte type
MOST = 32  # tensors of a launch
NARROW = 16  # a transposed matrix with fewer rows or columns is read element by element
PLANS = 4096  # that are kept


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


def merged_dims(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
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


class Form(NamedTuple):
    """What of a tensor decides how it is read and written."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        return Form(tensor.shape, tensor.stride(), tensor.dtype, is_aligned(tensor))


Member = tuple[int, int, int, int]  # which source, where it goes, how much it has, how far it fills
Part = tuple[tuple[Group, ...], tuple[tuple[torch.Tensor, ...], ...], int]
Planned = tuple[tuple[Group, ...], tuple[tuple[int, ...], ...], int]
DTYPE = attrgetter("dtype")
OUT = -1  # no source: the buffer itself, of which nothing is read


def flat_groups(
    sources: Sequence[torch.Tensor], offsets: Sequence[int], out: torch.Tensor, block: int, kept: Sequence[int] = ()
) -> list[Part]:
    """What fills ``out``, by launch: groups, the sources of each, and the number of programs.

    ``sources[i]`` goes to ``offsets[i]``, which ascend; everything between and behind is zero, but for what is
    ``kept``: stretches of ``out``, first and last + 1 of each, that hold what they should. Contiguous sources
    of one dtype share a group, and with it vector loads; a source whose address or place is not aligned goes to
    another, so that it does not narrow theirs. Others are a group each, compiled for their strides.
    """
    planned = _planned(tuple(map(Form.of, sources)), tuple(offsets), Form.of(out), block, tuple(kept))
    given = (*sources, out)
    return [(groups, tuple(tuple(given[i] for i in some) for some in places), n) for groups, places, n in planned]


@lru_cache(PLANS)
def _planned(
    sources: tuple[Form, ...], offsets: tuple[int, ...], out: Form, block: int, kept: tuple[int, ...]
) -> list[Planned]:
    """By launch: groups, the numbers of each one's sources, and how many programs there are."""
    sizes = [math.prod(source.shape) for source in sources]
    numel = math.prod(out.shape)
    ends = [offset + size for size, offset in zip(sizes, offsets, strict=True)]
    known = [*zip(offsets, ends, range(len(sources)), strict=True)]
    known += [(*pair, OUT) for pair in zip(kept[::2], kept[1::2], strict=True)]
    taken = sorted(one for one in known if one[1] > one[0])
    bounds = [*(start for start, _, _ in taken), numel]
    pieces: dict[object, list[Member]] = {}

    def add(place: int, offset: int, size: int, stop: int, alone: bool = False) -> None:
        if stop > offset:
            source = sources[place] if place != OUT else out
            aligned = source.aligned and offset * out.dtype.itemsize % VECTOR == 0
            pieces.setdefault(place if alone else (source.dtype, aligned), []).append((place, offset, size, stop))

    add(OUT, 0, 0, bounds[0])
    for (offset, end, place), bound in zip(taken, bounds[1:], strict=True):
        if place == OUT:
            add(OUT, end, 0, bound)
            continue
        shape, stride = merged_dims(sources[place].shape, sources[place].stride)
        tiled = tile_dim(shape, stride) >= 0
        add(place, offset, sizes[place], end if tiled else bound, alone=stride not in ((), (1,)))
        if tiled:
            add(OUT, end, 0, bound)
    batches: list[list[list[Member]]] = []
    for members in pieces.values():
        for some in in_turns(members):
            if not batches or sum(map(len, batches[-1])) + len(some) > MOST:
                batches.append([])
            batches[-1].append(some)
    return [_grouped(batch, sources, block) for batch in batches]


def _grouped(batch: Sequence[Sequence[Member]], sources: Sequence[Form], block: int) -> Planned:
    groups, numbers, program = [], [], 0
    for members in batch:
        first, _, size, _ = members[0]
        shape, stride = merged_dims(sources[first].shape, sources[first].stride) if size else ((), ())
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
        numbers.append(tuple(number for number, *_ in members))
    return tuple(groups), tuple(numbers), program


def list_groups(
    *lists: Sequence[torch.Tensor], block: int, most: int = MOST, numbered: bool = False
) -> list[tuple[tuple[int, ...], Group]]:
    """Of parallel lists of tensors that are read and written in place, by launch: the places that it works on, not
    empty, of the same dtypes, no more than ``most``; and its programs.

    A row with an address that is not aligned is not among those whose addresses all are: it would narrow their loads.
    ``numbered``: whether each program returns something, at its number over all the first list.
    """
    present = [tensors for tensors in lists if tensors]
    dtypes = tuple(tuple(map(DTYPE, tensors)) for tensors in present)
    aligned = tuple(tuple(map(is_aligned, tensors)) for tensors in present)
    return _listed(tuple(map(torch.Tensor.numel, present[0])), dtypes, aligned, block, most, numbered)


@lru_cache(PLANS)
def _listed(
    sizes: tuple[int, ...],
    dtypes: tuple[tuple[torch.dtype, ...], ...],
    aligned: tuple[tuple[bool, ...], ...],
    block: int,
    most: int,
    numbered: bool,
) -> list[tuple[tuple[int, ...], Group]]:
    alike: dict[object, list[int]] = {}
    for place, (size, kinds, whole) in enumerate(zip(sizes, zip(*dtypes), zip(*aligned), strict=True)):
        if size:
            alike.setdefault((kinds, all(whole)), []).append(place)
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + ceil_div(size, block))
    found = []
    for places in (some for found in alike.values() for some in in_turns(found, most)):
        own = tuple(sizes[place] for place in places)
        starts = [0]
        for size in own:
            starts.append(starts[-1] + ceil_div(size, block))
        offsets = tuple(firsts[place] for place in places) if numbered else tuple(starts[:-1])
        found.append((tuple(places), Group(tuple(starts), offsets, own, own)))
    return found


def in_turns(items: list[T], most: int = MOST) -> list[list[T]]:
    """No more than ``most`` at a time."""
    return [items[begin : begin + most] for begin in range(0, len(items), most)]
