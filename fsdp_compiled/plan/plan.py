"""The plan: which parameters are gathered together, and where every element lies. Arithmetic, no graphs.

Terms, used with these meanings everywhere in the package:

- *block*: a submodule that was named, or found, to be gathered by itself; ``root`` is the rest of the model.
- *unit*: parameters that are gathered together: a block, small neighbours merged, or a part of a large one (`buckets`).
- *buffer*: a unit's parameters that share dtype, trainability and optimizer group, laid end to end in one flat
  tensor. Gathered, the buffer *is* the parameters: each is a view of it and nothing is copied out.
- *slot*: one parameter's place in its buffer.
- *shard*: the slice of a buffer that one rank owns. Rank ``r`` owns elements ``[r * n, (r + 1) * n)``.
- *part*: the elements of one parameter that a rank's shard has. `Buffer.part` says which, whatever the layout.
- *by rows*: the other layout (`rows`): a rank owns rows of each parameter, as FSDP2's DTensors say it, so that shards
  are true DTensors by themselves, and gathered parameters are copied out of the buffer.
- *owner*: the rank along the shard axis that updates a parameter whole, where its optimizer cannot do so in parts.
- *axis*: one dimension of the device mesh: ``"shard"`` (a buffer is cut along it), ``"replicate"`` (it is repeated) or
  ``"tp"`` (tensor parallelism: parameters are cut along a dim of theirs before they are laid into buffers, and each
  rank's buffers hold its parts; parameters that are whole on every rank along it have buffers of their own).
- *neighbours*: ranks that follow one another along the shard axis, such as those of a node. ``"each 8 ranks"`` is an
  axis of its own in collectives.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled.plan.hardware import CPU, Cluster
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.owners import dealt, update_cost
from fsdp_compiled.plan.text import describe, fold
from fsdp_compiled.policy import Placement, Policy

Axis = Literal["shard", "replicate", "tp"]


def axis_of(neighbours: int) -> str:
    """What collectives among so many neighbours call their axis."""
    return f"each {neighbours} ranks"


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its buffer; offset and size in elements. By rows, it is the place in a rank's shard."""

    leaf: Leaf
    offset: int

    def __hash__(self) -> int:
        return hash(self.leaf.names)

    @property
    def name(self) -> str:
        return self.leaf.names[0]

    @property
    def end(self) -> int:
        return self.offset + self.leaf.numel

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its place in the buffer, as a view of the parameter's shape."""
        return self.leaf.at(flat, self.offset)


@dataclass(frozen=True)
class Part:
    """The elements of a parameter that a rank's shard has: ``[first, last)`` in memory order, often none. By rows,
    where ranks divide another dim than the first, elements are counted rank by rank.

    They begin at ``offset`` of the shard.
    """

    first: int
    last: int
    offset: int

    @property
    def numel(self) -> int:
        return self.last - self.first

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """These elements, ``[numel]``: a view of the shard, or of what has the same layout (a gradient, an average)."""
        return shard[self.offset : self.end]


@dataclass(frozen=True)
class Division:
    """The divisor of the sum of gradients over the ranks: ``factor``, or, if None, the number of ranks. ``sums``:
    whether collectives sum, and the division follows, instead of collectives that take means."""

    factor: float | None = None
    sums: bool = False


_LYING: dict[Hashable, int] = {}  # a number for each layout of a buffer: to hash a layout takes long


@dataclass(frozen=True)
class Buffer:
    """Parameters of one unit that share dtype, trainability and optimizer group, end to end."""

    key: str
    unit: str
    dtype: torch.dtype
    trainable: bool
    group: int | None
    slots: tuple[Slot, ...]
    numel: int  # padded to a multiple of the shard axis
    by_rows: bool = False  # each rank's shard holds rows of every parameter (`rows`)
    split: bool = False  # whether each rank along the tp axis has a part of its parameters; if not, the whole
    division: Division = Division()
    hooked: bool = False  # a loop's hook gets the reduced gradient before the rest of the division and the cast
    precision: MixedPrecisionPolicy | None = None  # None: the policy's

    def __hash__(self) -> int:  # the default hash, of all slots, takes longer than a look-up
        return hash(self.key)

    @property
    def updated(self) -> bool:
        return self.trainable and self.group is not None

    @cached_property
    def lies(self) -> int:
        """A number that is the same for buffers whose parameters have the same layout, block by block."""
        blocks: dict[str, int] = {}
        slots = [
            (slot.offset, leaf.shape, leaf.order, leaf.shard_dim, blocks.setdefault(leaf.block, len(blocks)))
            for slot, leaf in ((slot, slot.leaf) for slot in self.slots)
        ]
        return _LYING.setdefault((self.dtype, self.numel, self.by_rows, tuple(slots)), len(_LYING))

    def part(self, slot: Slot, rank: int, ranks: int) -> Part:
        """The elements of a parameter in the shard of one of ``ranks`` ranks. With one rank that is everything,
        whatever ``rank`` is. All code asks here, for both layouts."""
        numel, size = slot.leaf.numel, self.numel // ranks
        rank = rank if ranks > 1 else 0
        if self.by_rows:
            each = math.prod(slot.leaf.chunk(ranks))
            first = min(rank * each, numel)
            return Part(first, min(first + each, numel), slot.offset)
        start = rank * size
        first = min(max(start - slot.offset, 0), numel)
        last = max(min(start + size - slot.offset, numel), first)
        return Part(first, last, min(max(slot.offset - start, 0), size))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def padding(self) -> int:
        """The number of elements that belong to no parameter; they are zero and stay zero."""
        return self.numel - sum(slot.leaf.numel for slot in self.slots)


@dataclass(frozen=True)
class Unit:
    name: str
    buffers: tuple[Buffer, ...]
    # Whether it is freed after forward and gathered again for backward, where the placement says so. A number: until
    # then, what is gathered stays cut over so many neighbours.
    reshard: bool | int = True

    @property
    def members(self) -> tuple[str, ...]:
        """The blocks whose parameters it holds, in registration order."""
        return tuple(dict.fromkeys(slot.leaf.block for buffer in self.buffers for slot in buffer.slots))


@dataclass(frozen=True)
class Plan:
    """How everything is sharded: the units, in the model's registration order, the mesh and the policy."""

    units: tuple[Unit, ...]
    policy: Policy
    device: torch.device
    shard: int = 1  # ranks along the shard axis
    replicate: int = 1  # ranks along the replicate axis
    machine: Cluster = CPU
    notes: tuple[str, ...] = ()  # the choices that were made, and why
    tp: int = 1  # ranks along the tp axis, which see the same batches

    @property
    def placement(self) -> Placement:
        return self.policy.placement

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(buffer for unit in self.units for buffer in unit.buffers)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The submodules that are gathered by themselves or with others; ``root`` is the rest of the model."""
        return tuple(dict.fromkeys(block for unit in self.units for block in unit.members))

    @property
    def resharded(self) -> frozenset[str]:
        """The units that backward gathers again."""
        wanted = self.placement.regather and self.shard > 1
        return frozenset(unit.name for unit in self.units if unit.reshard and wanted)

    @cached_property
    def neighbours(self) -> dict[str, int]:
        """By resharded unit that stays cut over a part of the ranks along the shard axis: how many."""
        sizes = {unit.name: int(unit.reshard) for unit in self.units if unit.name in self.resharded}
        return {name: size for name, size in sizes.items() if 1 < size < self.shard}

    @property
    def kernels(self) -> bool:
        """Whether the package's own operators are inserted."""
        return self.device.type == "cuda" if self.policy.kernels == "auto" else self.policy.kernels

    @cached_property
    def owners(self) -> dict[str, int]:
        """For each parameter that is updated whole, by name: the rank along the shard axis that updates it.

        Where every rank has all of the state, every rank makes the whole update, and there are no owners.
        """
        if not self.placement.state or self.shard == 1:
            return {}
        slots = [slot for slot, _ in self._owned]
        held = [held for _, held in self._owned]
        ranks = dealt([update_cost(slot.leaf.shape) for slot in slots], self.shard, held)
        return {slot.name: rank for slot, rank in zip(slots, ranks, strict=True)}

    @property
    def _owned(self) -> list[tuple[Slot, list[int]]]:
        """The parameters that are updated whole, each with its number of elements on each rank along the shard axis."""
        found = []
        for buffer in self.buffers:
            for slot in buffer.slots if buffer.updated else ():
                if slot.leaf.owned:
                    found.append((slot, [part.numel for part in self.parts(buffer, slot)]))
        return found

    @property
    def state_device(self) -> torch.device:
        """Where shards and the optimizer's state live between steps."""
        return torch.device("cpu") if self.policy.offload else self.device

    @property
    def world(self) -> int:
        """The number of ranks with batches of their own."""
        return self.shard * self.replicate

    @property
    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """The axes of ranks with batches of their own, if they have more than one rank: other axes send nothing."""
        axes: tuple[tuple[Axis, int], ...] = (("shard", self.shard), ("replicate", self.replicate))
        return tuple((name, size) for name, size in axes if size > 1)

    @property
    def all_axes(self) -> tuple[tuple[Axis, int], ...]:
        """`axes`, with the tp axis before them."""
        return ((("tp", self.tp),) if self.tp > 1 else ()) + self.axes

    @property
    def uneven(self) -> bool:
        """Whether ranks along the tp axis have parts of different sizes, and so programs of different shapes."""
        return any(slot.leaf.tp is not None and slot.leaf.tp.uneven for b in self.buffers for slot in b.slots)

    def size(self, axis: str) -> int:
        """Ranks along this axis, among neighbours (``each 8 ranks``), or in a process group of the model's own: ``all 4
        ranks``, ``group 0 of 2 ranks``."""
        known = {"shard": self.shard, "replicate": self.replicate, "tp": self.tp}
        return known[axis] if axis in known else int(axis.split()[-2])

    def stride(self, axis: str) -> int:
        """The distance in ranks between neighbours along this axis: tp is the innermost, replicate the outermost. The
        ranks of a process group of the model are taken to be as far apart as they can be."""
        known = {"tp": 1, "shard": self.tp, "replicate": self.tp * self.shard}
        known |= {axis_of(size): self.tp for size in self.neighbours.values()}
        return known[axis] if axis in known else max(self.shard * self.replicate * self.tp // self.size(axis), 1)

    def transfer(self, nbytes: float, axis: str, both: bool = False) -> float:
        """Seconds of an all-gather that gives ``nbytes``, or a reduce-scatter of them; ``both``: of an all-reduce."""
        return self.machine.transfer(nbytes, self.size(axis), self.stride(axis), both)

    @property
    def graphed(self) -> bool:
        """Whether a step is assumed to run as a CUDA graph, in which the host launches nothing itself."""
        return self.device.type == "cuda" and self.policy.cuda_graph is not False

    @cached_property
    def exchanged(self) -> list[tuple[int, list[Buffer]]]:
        """The parts that sites exchange under ``Policy.sync_every``, of about equal size: each with the step of a round
        after which it is sent."""
        assert self.policy.sync_every is not None
        trained = [buffer for buffer in self.buffers if buffer.updated]
        total, before = sum(map(self.shard_numel, trained)), 0
        parts: dict[int, list[Buffer]] = {}
        for buffer in trained:
            middle = before + self.shard_numel(buffer) / 2
            parts.setdefault(int(self.policy.exchange.parts * middle / total), []).append(buffer)
            before += self.shard_numel(buffer)
        steps = (self.policy.sync_every * (number + 1) // len(parts) for number in range(len(parts)))
        return list(zip(steps, parts.values(), strict=True))

    def buffer(self, key: str) -> Buffer:
        return self._by_key[key]

    @cached_property
    def _by_key(self) -> dict[str, Buffer]:
        return {buffer.key: buffer for buffer in self.buffers}

    def compute_dtype(self, buffer: Buffer) -> torch.dtype:
        """The dtype of the buffer in forward, in backward and on the wire."""
        dtype = (buffer.precision or self.policy.precision).param_dtype
        return dtype if dtype is not None and buffer.dtype.is_floating_point else buffer.dtype

    def reduce_dtype(self, buffer: Buffer) -> torch.dtype:
        return (buffer.precision or self.policy.precision).reduce_dtype or self.compute_dtype(buffer)

    def shard_numel(self, buffer: Buffer) -> int:
        """The number of the buffer's elements that a rank holds between steps."""
        return buffer.numel // self.shard if self.placement.parameter else buffer.numel

    def copied(self, buffer: Buffer) -> bool:
        """Whether a rank keeps its shard of the buffer in the compute dtype as well."""
        wanted = self.kernels if self.policy.copies == "auto" else self.policy.copies
        return wanted and not self.policy.offload and buffer.updated and self.compute_dtype(buffer) != buffer.dtype

    def part(self, buffer: Buffer, slot: Slot, rank: int, cut: bool) -> Part:
        """The elements of a parameter, or of a tensor with its layout (gradient, state), on the rank at this place of
        the shard axis. ``cut``: whether the placement cuts that tensor, or each rank has the whole."""
        return buffer.part(slot, rank, self.shard if cut else 1)

    def parts(self, buffer: Buffer, slot: Slot) -> list[Part]:
        """`part` of each rank, for a tensor that is cut."""
        return [buffer.part(slot, rank, self.shard) for rank in range(self.shard)]

    def own(self, flat: torch.Tensor, rank: int, cut: bool) -> torch.Tensor:
        """The part of ``flat`` (``[numel]``) on the rank at this place of the shard axis: its shard, or all; a view."""
        return flat.view(self.shard, -1)[rank] if cut else flat

    @property
    def persistent_bytes(self) -> int:
        """Bytes of parameters that a rank holds between steps, without optimizer state."""
        return sum(self.shard_numel(buffer) * buffer.dtype.itemsize for buffer in self.buffers)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies of shards that a rank keeps in the compute dtype."""
        return sum(self.shard_numel(b) * self.compute_dtype(b).itemsize for b in self.buffers if self.copied(b))

    def sum_bytes(self, accumulate: str | None = None) -> int:
        """Bytes of gradients that a rank holds between microbatches, under ``Policy.accumulate`` or the one given."""
        whole = (accumulate or self.policy.accumulate) == "full" and self.world > 1
        held = 0
        for buffer in self.buffers:
            if buffer.updated:
                cut = self.shard if self.placement.gradient and not whole else 1
                dtype = self.reduce_dtype(buffer) if whole else buffer.dtype
                held += buffer.numel // cut * dtype.itemsize
        return held

    def __str__(self) -> str:
        return "\n".join(fold(describe(self)))

    __repr__ = __str__  # what an interactive prompt shows
