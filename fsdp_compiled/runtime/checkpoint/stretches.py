"""Which elements of which tensors this rank holds: its flat shards, by the model's own names.

    buffer layers.0 (64 elements), rank 1 of 2:  [32, 64)
        layers.0.weight at 0..48     ->  model.layers.0.weight [32, 48)
        layers.0.bias at 48..56      ->  model.layers.0.bias [0, 8)

Elements count in the parameter's memory order; of a parameter that is cut along the tp axis, in that of the part that
this rank has. Names are ``model.<parameter>`` and ``optimizer.state.<parameter>.<name>``, shapes those of the whole,
whatever unit, buffer and rank the elements lie in. Files hold elements of parts in the parts' own order, so that what a
rank holds is one piece of a file whichever dim was cut.

Elements ``[start, stop)`` of a tensor, in memory order, are at most ``2 * dims - 1`` rectangles.

[7, 23) of a 4 x 6 tensor          row 1 from column 1 on, rows 2 to 2, row 3 up to column 4:

    . . . . . .                    (1, 1) 1 x 5
    . a a a a a                    (2, 0) 1 x 6
    b b b b b b                    (3, 0) 1 x 5
    c c c c c .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.optim.rule import Rule, rule_for
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.runtime.parameters.shard_layout import ShardPlace
from fsdp_compiled.torch_private.dtensor import LocalShardsWrapper

Part = tuple[tuple[int, ...], torch.Tensor]  # offsets in the whole tensor, and a view
GRAIN = 64  # elements: replicas share a shard's elements in multiples of it


class Cut(NamedTuple):
    """One of ``parts`` along ``dim``, all as large as the first: zeros that are not in the whole end the last ones
    where ``parts`` do not divide the dim."""

    dim: int
    part: int
    parts: int

    def __str__(self) -> str:
        return f"part {self.part + 1} of {self.parts} along dim {self.dim}"


def part_shape(shape: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """The shape of a part, ``[4, 6]`` -> ``[4, 3]``."""
    if cut is None:
        return tuple(shape)
    return tuple(-(-size // cut.parts) if dim == cut.dim else size for dim, size in enumerate(shape))


def length_in_whole(shape: Sequence[int], cut: Cut) -> int:
    """How much of the whole's dim is in the part: the rest of it is zeros."""
    each = part_shape(shape, cut)[cut.dim]
    return min(max(shape[cut.dim] - cut.part * each, 0), each)


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor, or of a part, in memory order, from this byte of a file on."""

    start: int
    stop: int
    file: str
    offset: int
    cut: Cut | None = None


@dataclass
class Entry:
    """One tensor. ``order``: its dims from slowest to fastest in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def part_numel(self, cut: Cut | None) -> int:
        return int(torch.Size(part_shape(self.shape, cut)).numel())


@dataclass(frozen=True)
class Stretch:
    """Elements ``[start, stop)`` of a tensor of this shape, or of a part, in the memory order of its dims (``order``,
    slowest first). ``values`` are they, 1-d: a view of the state, which a save reads and a load writes."""

    name: str
    start: int
    stop: int
    values: torch.Tensor
    shape: tuple[int, ...]
    order: tuple[int, ...]
    cut: Cut | None = None

    @property
    def whole(self) -> bool:
        return self.cut is None and self.start == 0 and self.stop == torch.Size(self.shape).numel()

    @cached_property
    def key(self) -> str:
        """Its name in a file."""
        return key_of(self.name, self.start, self.stop, self.whole, self.cut)


def key_of(name: str, start: int, stop: int, whole: bool, cut: Cut | None) -> str:
    """The tensor's own name where it is whole, so that any reader of safetensors finds it."""
    key = f"{name}, {cut}" if cut is not None else name
    return name if whole else f"{key}[{start}:{stop}]"


@dataclass(frozen=True)
class Place:
    """Where a rank is along the axes that cut something."""

    shard: int = 0
    tp: int = 0

    def cut(self, leaf: Leaf, plan: Plan) -> Cut | None:
        """Which part of the parameter a rank here has."""
        if not leaf.split:
            return None
        assert leaf.tp is not None and leaf.tp.dim is not None
        return Cut(leaf.tp.dim, self.tp, plan.tp)


def place_of(mesh: Mesh) -> Place:
    return Place(mesh.shard_rank, mesh.tp_rank)


@dataclass(frozen=True)
class Holders:
    """This rank among all, of which some hold the same elements."""

    rank: int
    places: Sequence[Place]

    def share(self, cut: bool, split: bool) -> tuple[int, int]:
        """Which part, of how many, of the elements that it holds are this rank's to write.

        ``cut``: each rank along the shard axis has others; ``split``: each along the tp axis.
        """
        own = self.places[self.rank]
        same = [
            rank
            for rank, place in enumerate(self.places)
            if (not cut or place.shard == own.shard) and (not split or place.tp == own.tp)
        ]
        return same.index(self.rank), len(same)


def parameter_name(slot: Slot) -> str:
    return f"model.{slot.name}"


def state_name(slot: Slot, name: str) -> str:
    return f"optimizer.state.{slot.name}.{name}"


def split_state_name(key: str) -> tuple[str, str] | None:
    """The parameter and the name of an optimizer's state; None for a key that is none."""
    if not key.startswith("optimizer.state."):
        return None
    parameter, name = key.removeprefix("optimizer.state.").rsplit(".", 1)
    return parameter, name


def per_element(buffer: Buffer, rules: Sequence[Rule]) -> list[str]:
    """The names of the optimizer's state that has an element for each of the buffer's."""
    if not buffer.updated or not rules:
        return []
    assert buffer.group is not None
    return [entry.name for entry in rule_for(rules, buffer.group).state if not entry.scalar]


def tensors(plan: Plan, rules: Sequence[Rule], optimizer: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Every tensor that the ranks hold together, without pieces."""
    found: dict[str, Entry] = {}
    for buffer in plan.buffers:
        for slot in buffer.slots:
            leaf = slot.leaf
            found[parameter_name(slot)] = Entry(leaf.whole_shape, leaf.dtype, leaf.order)
            for name in per_element(buffer, rules):
                dtype = optimizer[f"{buffer.key}.{name}"].dtype
                found[state_name(slot, name)] = Entry(leaf.whole_shape, dtype, leaf.order)
    return found


def aliases(plan: Plan) -> dict[str, str]:
    """Other names of tied parameters, each with the first."""
    return {name: slot.name for b in plan.buffers for slot in b.slots for name in slot.leaf.names[1:]}


def held(
    plan: Plan,
    rules: Sequence[Rule],
    place: Place,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    holders: Holders | None = None,
) -> Iterator[Stretch]:
    """What a rank here holds; with ``holders``, what of that it writes, so that all ranks write each element once."""
    placement = plan.placement
    for buffer in plan.buffers:
        cuts = {slot.name: place.cut(slot.leaf, plan) for slot in buffer.slots}
        which = place.shard if placement.parameter else None
        yield from _of_buffer(buffer, None, parameters[buffer.key], which, cuts, holders)
        which = place.shard if placement.state else None
        for name in per_element(buffer, rules):
            yield from _of_buffer(buffer, name, optimizer[f"{buffer.key}.{name}"], which, cuts, holders)


def _range(buffer: Buffer, size: int, which: int | None, holders: Holders | None) -> tuple[int, int]:
    """The elements of a shard of ``size`` that are held, or written."""
    part, parts = holders.share(which is not None, buffer.split) if holders is not None else (0, 1)
    grains = -(-size // GRAIN)
    return grains * part // parts * GRAIN, min(grains * (part + 1) // parts * GRAIN, size)


def _of_buffer(
    buffer: Buffer,
    name: str | None,
    values: torch.Tensor,
    which: int | None,
    cuts: Mapping[str, Cut | None],
    holders: Holders | None,
) -> Iterator[Stretch]:
    """``which``: the rank whose shard ``values`` are; None: they are all of the buffer."""
    first, last = _range(buffer, values.numel(), which, holders)
    for slot in buffer.slots:
        part = buffer.part(slot, which or 0, buffer.numel // values.numel())
        begin = slot.offset + part.first - part.offset  # where its shard does, if the parameter begins at its offset
        start, stop = begin + max(part.offset, first), begin + min(part.end, last)
        if start < stop:
            tensor = parameter_name(slot) if name is None else state_name(slot, name)
            own = values[start - begin : stop - begin]
            leaf, at = slot.leaf, slot.offset
            yield Stretch(tensor, start - at, stop - at, own, leaf.whole_shape, leaf.order, cuts[slot.name])


class Rectangle(NamedTuple):
    """Where it begins, how long it is in each dim, and the number of its first element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Elements ``[start, stop)`` of a contiguous tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield Rectangle((), (), start)
        return
    inner = math.prod(shape[1:])
    row, rows = start // inner, (stop - start) // inner
    if start % inner or not rows:  # it begins with a part of a row
        end = min(stop, (row + 1) * inner)
        for offsets, sizes, first in rectangles(shape[1:], start % inner, end - row * inner):
            yield Rectangle((row, *offsets), (1, *sizes), first + row * inner)
    else:
        end = start + rows * inner
        yield Rectangle((row, *[0] * (len(shape) - 1)), (rows, *shape[1:]), start)
    yield from rectangles(shape, end, stop)


def parts_of(one: Stretch) -> list[Part]:
    """A stretch as rectangles of the whole tensor: views of its values, in the tensor's own dims."""
    back = [one.order.index(dim) for dim in range(len(one.shape))]
    shape, begin = part_shape(one.shape, one.cut), [0] * len(one.shape)
    if one.cut is not None:
        begin[one.cut.dim] = one.cut.part * shape[one.cut.dim]
    found = []
    for offsets, sizes, first in rectangles([shape[dim] for dim in one.order], one.start, one.stop):
        count = torch.Size(sizes).numel()
        view = one.values[first - one.start : first - one.start + count].view(sizes).permute(back)
        at = [offsets[place] for place in back]
        if one.cut is not None:  # without what is not in the whole
            dim = one.cut.dim
            view = view.narrow(dim, 0, min(max(length_in_whole(one.shape, one.cut) - at[dim], 0), view.shape[dim]))
        if view.numel():
            found.append((tuple(map(sum, zip(at, begin, strict=True))), view))
    return found


def wrapped(parts: list[Part]) -> LocalShardsWrapper:
    """Rectangles as DCP writes and reads them."""
    return LocalShardsWrapper([view for _, view in parts], [offsets for offsets, _ in parts])


def rectangles_of(place: ShardPlace, values: torch.Tensor) -> LocalShardsWrapper | None:
    """What this rank has of a parameter, or of its gradient or average, as DCP writes and reads it; None: nothing.

    ``values``: this rank's, 1-d, at ``place``.
    """
    leaf, mesh = place.leaf, place.layout.mesh
    cut = place_of(mesh).cut(leaf, place.layout.plan)
    start, stop = place.own
    if start == stop:
        return None
    parts = parts_of(Stretch(place.name, start, stop, values, tuple(place.shape), leaf.order, cut))
    return wrapped(parts) if parts else None
