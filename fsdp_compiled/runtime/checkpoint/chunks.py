"""Chunks: which elements of the model's own tensors this rank's flat shards hold.

    buffer layers.0 (64 elements), rank 1 of 2:  [32, 64)
        layers.0.weight at 0..48     ->  model.layers.0.weight [32, 48), as chunks
        layers.0.bias at 48..56      ->  model.layers.0.bias [0, 8)

A *chunk* is a rectangle of a whole tensor, as in `torch.distributed.checkpoint`. Names are ``model.<parameter>`` and
``optimizer.state.<parameter>.<name>``. Shapes are those of the whole tensor, whichever unit, buffer, rank and part
along the tp axis hold the elements.

Elements ``[start, stop)`` of a tensor, in memory order, are at most ``2 * dims - 1`` rectangles.

[7, 23) of a 4 x 6 tensor          row 1 from column 1 on, rows 2 to 2, row 3 up to column 4:

    . . . . . .                    (1, 1) 1 x 5
    . a a a a a                    (2, 0) 1 x 6
    b b b b b b                    (3, 0) 1 x 5
    c c c c c .
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.optim.rule import Rule, rule_for
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.torch_private.dtensor import LocalShardsWrapper

Shape = tuple[int, ...]
Rectangle = tuple[int, Shape, Shape]  # the number of its first element, where it begins, its length in each dim
GRAIN = 64  # elements: replicas split a shard's elements in multiples of it


def overlap(offsets: Shape, sizes: Shape, others: Shape, other_sizes: Shape) -> tuple[Shape, Shape] | None:
    """The intersection of two rectangles: its offsets and its end."""
    begin = tuple(map(max, zip(offsets, others, strict=True)))
    ends = zip(map(sum, zip(offsets, sizes)), map(sum, zip(others, other_sizes)), strict=True)
    end = tuple(map(min, ends))
    return None if any(start >= stop for start, stop in zip(begin, end)) else (begin, end)


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor of this shape. ``values`` are its elements, in its sizes. For what a rank holds, they are
    a view of the state, which a save reads and a load writes."""

    name: str
    offsets: Shape
    values: torch.Tensor
    shape: Shape

    @cached_property
    def key(self) -> str:
        """Its name in a file."""
        return key_of(self.name, self.offsets, tuple(self.values.shape), self.shape)

    def part_of(self, given: torch.Tensor) -> torch.Tensor:
        """A view of these elements of the tensor, which is whole, or in the form of `wrapped`.

        Raises ``ValueError`` if it is cut in another way.
        """
        if not isinstance(given, DTensor):
            return given.detach()[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.values.shape, strict=True))]
        local = given.to_local()
        if isinstance(local, LocalShardsWrapper):
            for offsets, shard in zip(local.local_offsets(), local.local_shards(), strict=True):
                if (tuple(offsets), shard.shape) == (self.offsets, self.values.shape):
                    return shard
        raise ValueError(
            f"{self.name} is cut in another way, so nothing was loaded: give what state_dict() returned here, or whole "
            "tensors."
        )


def key_of(name: str, offsets: Shape, sizes: Shape, shape: Shape) -> str:
    """Its name in a file: the tensor's own if it is the whole, so that any reader of safetensors finds it."""
    if sizes == shape:
        return name
    return f"{name}[{', '.join(f'{start}:{start + size}' for start, size in zip(offsets, sizes, strict=True))}]"


def by_name(chunks: Iterable[Chunk]) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = {}
    for one in chunks:
        found.setdefault(one.name, []).append(one)
    return found


def whole_chunk(name: str, values: torch.Tensor) -> Chunk:
    return Chunk(name, (0,) * values.dim(), values, tuple(values.shape))


@dataclass(frozen=True)
class Piece:
    """A chunk in a file, from byte ``start`` on."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass
class Entry:
    """One tensor."""

    shape: Shape
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Place:
    """Where a rank is along the axes that cut something."""

    shard: int = 0
    tp: int = 0


def place_of(mesh: Mesh) -> Place:
    return Place(mesh.shard_rank, mesh.tp_rank)


@dataclass(frozen=True)
class Holders:
    """This rank among all ranks; some of them hold the same elements."""

    rank: int
    places: Sequence[Place]

    def share(self, cut: bool, split: bool) -> tuple[int, int]:
        """Which part of the elements that this rank holds it writes, and of how many parts.

        ``cut``: ranks along the shard axis hold different elements; ``split``: ranks along the tp axis do.
        """
        own = self.places[self.rank]
        same = [
            rank
            for rank, place in enumerate(self.places)
            if (not cut or place.shard == own.shard) and (not split or place.tp == own.tp)
        ]
        return same.index(self.rank), len(same)


def name_of(slot: Slot, name: str | None = None) -> str:
    """The name of a parameter, or of the state of this name that an optimizer keeps for it."""
    return f"model.{slot.name}" if name is None else f"optimizer.state.{slot.name}.{name}"


def split_state_name(key: str) -> tuple[str, str] | None:
    """The parameter and the state's name in an optimizer state key; None for any other key."""
    if not key.startswith("optimizer.state."):
        return None
    parameter, name = key.removeprefix("optimizer.state.").rsplit(".", 1)
    return parameter, name


def per_element(buffer: Buffer, rules: Sequence[Rule]) -> list[str]:
    """The names of the optimizer state that has one element for each of the buffer's."""
    if not buffer.updated or not rules:
        return []
    assert buffer.group is not None
    return [entry.name for entry in rule_for(rules, buffer.group).state if not entry.scalar]


def tensors(plan: Plan, rules: Sequence[Rule], optimizer: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Every tensor that the ranks hold together, without pieces."""
    found: dict[str, Entry] = {}
    for buffer in plan.buffers:
        for name in (None, *per_element(buffer, rules)):
            for slot in buffer.slots:
                dtype = slot.leaf.dtype if name is None else optimizer[f"{buffer.key}.{name}"].dtype
                found[name_of(slot, name)] = Entry(slot.leaf.whole_shape, dtype)
    return found


def aliases(plan: Plan) -> dict[str, str]:
    """Other names of tied parameters, each with the first name."""
    return {name: slot.name for b in plan.buffers for slot in b.slots for name in slot.leaf.names[1:]}


def held(
    plan: Plan,
    rules: Sequence[Rule],
    place: Place,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    holders: Holders | None = None,
) -> Iterator[Chunk]:
    """The chunks that a rank here holds; with ``holders``, those that it writes, each element once among ranks."""
    for buffer in plan.buffers:
        for name in (None, *per_element(buffer, rules)):
            values = parameters[buffer.key] if name is None else optimizer[f"{buffer.key}.{name}"]
            cut = plan.placement.parameter if name is None else plan.placement.state
            part, parts = holders.share(cut, buffer.split) if holders is not None else (0, 1)
            grains = -(-values.numel() // GRAIN)
            first, last = grains * part // parts * GRAIN, grains * (part + 1) // parts * GRAIN
            for slot in buffer.slots:
                own = buffer.part(slot, place.shard if cut else 0, buffer.numel // values.numel())
                start, stop = max(own.offset, first), min(own.end, last)
                if start < stop:
                    begin = own.first + start - own.offset
                    yield from chunks_of(name_of(slot, name), slot.leaf, place, begin, values[start:stop])


def chunks_of(name: str, leaf: Leaf, place: Place, start: int, values: torch.Tensor) -> Iterator[Chunk]:
    """A parameter's elements from ``start`` on, in memory order, as chunks of the whole tensor. If the tp axis cuts the
    parameter, they are elements of this rank's part, without the zeros that may end it."""
    cut = leaf.tp.dim if leaf.split and leaf.tp is not None else None
    back = [leaf.order.index(dim) for dim in range(len(leaf.shape))]
    for first, offsets, sizes in rectangles(leaf.shape, leaf.order, start, start + values.numel()):
        at = tuple(o + place.tp * leaf.shape[dim] * (dim == cut) for dim, o in enumerate(offsets))
        flat = values[first - start : first - start + math.prod(sizes)]
        view = flat.view([sizes[dim] for dim in leaf.order]).permute(back)
        inside = view[tuple(slice(max(size - o, 0)) for size, o in zip(leaf.whole_shape, at, strict=True))]
        if inside.numel():
            yield Chunk(name, at, inside, leaf.whole_shape)


def rectangles(shape: Sequence[int], order: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Rectangles of elements ``[start, stop)`` of a tensor whose dims lie in this order in memory, slowest first."""
    back = [order.index(dim) for dim in range(len(shape))]
    for first, offsets, sizes in _contiguous([shape[dim] for dim in order], start, stop):
        yield first, tuple(offsets[at] for at in back), tuple(sizes[at] for at in back)


def _contiguous(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    if start >= stop:
        return
    if not shape:
        yield start, (), ()
        return
    inner = math.prod(shape[1:])
    row, rows = start // inner, (stop - start) // inner
    if start % inner or not rows:  # it begins inside a row
        end = min(stop, (row + 1) * inner)
        for first, offsets, sizes in _contiguous(shape[1:], start % inner, end - row * inner):
            yield first + row * inner, (row, *offsets), (1, *sizes)
    else:
        end = start + rows * inner
        yield start, (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
    yield from _contiguous(shape, end, stop)


def wrapped(chunks: Sequence[Chunk]) -> LocalShardsWrapper:
    """The chunks in the form that DCP writes and reads."""
    return LocalShardsWrapper([one.values for one in chunks], [one.offsets for one in chunks])
