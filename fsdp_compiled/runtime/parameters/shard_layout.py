"""Where a parameter's values lie after compile_sharded, and how they are gathered.

    buffer   [ a a a a a a | b b b 0 ]       rank 0 owns a a a a a, rank 1 a b b b 0
    ShardPlace    of a: 0 to 5 of rank 0's shard, 0 to 1 of rank 1's; of b: nothing, and 1 to 4

A parameter's part on a rank is a stretch of its elements in memory order, often none of them.

`Writes` turns the user's writes to parameters between calls into a number that ranks compare. So a rank that wrote
alone is detected.

    each rank has a part of a parameter    operators are counted, by name and parameter, where they run
    each rank has all of it (ddp)          PyTorch's counters of writes to the buffers, from one call's end to the next
    one rank                               nothing

Ranks compare it in a step, before anything is updated (`passes.report`), and in calls in which they meet, such as
saving or reading a whole parameter. Order does not count: ranks that lack a write can make it later, and are alike
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from zlib import crc32

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.call_store import WRITES
from fsdp_compiled.distributed.device_mesh import device_mesh_of_all
from fsdp_compiled.distributed.mesh import Mesh, gather_parts, gather_shards
from fsdp_compiled.plan.leaf import Leaf, contiguous_stride
from fsdp_compiled.plan.plan import Buffer, Part, Plan, Slot
from fsdp_compiled.runtime.state import wait_for_host_memory
from fsdp_compiled.runtime.tensor_parallel.parts import part_of, whole_value

version = attrgetter("_version")
BITS = 40


class Writes:
    """``total``: the sum of all writes. ``shards``: by buffer key, if there are several ranks with all of them."""

    def __init__(self, shards: Mapping[str, torch.Tensor] | None = None) -> None:
        self.total = 0
        self.shards = shards
        self._seen = 0

    def add(self, operator: str, name: str) -> None:
        """One operator that wrote to one parameter."""
        self.total = (self.total + crc32(f"{operator} {name}".encode())) % 2**BITS

    def begin(self) -> None:
        """Marks the start of a call: writes since the last call were the user's."""
        if self.shards is not None:
            self.total = (self.total + self._count() - self._seen) % 2**BITS
            self._seen = self._count()

    def end(self) -> None:
        """Marks the end of a call: writes in it were not the user's."""
        if self.shards is not None:
            self._seen = self._count()

    def _count(self) -> int:
        assert self.shards is not None
        return sum(map(version, self.shards.values()))

    def __str__(self) -> str:
        """What is appended to a call's label."""
        return f"{WRITES}{self.total:x}" if self.total else ""


@dataclass(eq=False)
class Layout:
    """The shards of one model. ``shards``: by buffer key, the same dictionary as the state's, so that a tensor put
    there is the one that is read. ``calls``: where ranks tell what they do, once it exists."""

    plan: Plan
    mesh: Mesh
    shards: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: Calls | None = None
    flips: int = 0  # how often ``requires_grad`` of a parameter was set to another value
    differentiated: bool = False  # whether autograd may hold parameters, from a call of the model itself
    gathered: nn.Module | None = None  # the model, while it holds all of every parameter
    gradients_left: bool = False  # whether a ``grad`` may be one that no `Sharded` set
    writes: Writes = field(default_factory=Writes)
    references: dict[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # to the parameters, by name

    def __post_init__(self) -> None:
        own = weakref.ref(self)

        def left(_: torch.Tensor) -> None:
            if (layout := own()) is not None:
                layout.gradients_left = True

        self.noticed = left  # what autograd calls when it has added to the gradient of a parameter

    @cached_property
    def whole(self) -> bool:
        """Whether each rank holds all of every parameter."""
        return self.mesh.tp == 1 and (self.mesh.shard == 1 or not self.plan.placement.parameter)

    @property
    def replicated(self) -> bool:
        """Whether there are several ranks, and each holds all of every parameter."""
        return self.whole and self.mesh.world > 1

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The user's mesh, or a 1-d mesh of all ranks."""
        return self.mesh.given if self.mesh.given is not None else device_mesh_of_all()

    def written(self) -> None:
        """Tells autograd that all shards were written, so that backward through an earlier call is an error."""
        increment_version(list(self.shards.values()))
        self.differentiated = False

    @contextmanager
    def meeting(self, label: str) -> Iterator[None]:
        """A call that all ranks make together, or none. If one makes another call, all ranks raise an error."""
        if self.calls is None:
            yield
            return
        with self.calls.meeting(f"{label}{self.writes}"):
            yield


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlace:
    """One parameter's place in this rank's shard. If the plan cuts nothing, that is all of it."""

    layout: Layout
    buffer: Buffer
    slot: Slot
    part: Part

    @property
    def leaf(self) -> Leaf:
        return self.slot.leaf

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.leaf.whole_shape)

    def like(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that looks like the whole parameter, without memory."""
        stride = contiguous_stride(self.shape) if self.leaf.split else self.leaf.stride
        return torch.empty_strided(self.shape, stride, dtype=dtype, device="meta")

    @property
    def live(self) -> torch.Tensor:
        """This rank's values, ``[part.numel]``, as the next step reads them."""
        wait_for_host_memory(self.layout.plan)
        return self.part.of(self.layout.shards[self.buffer.key])

    def written(self, operator: str) -> None:
        """Records that the operator wrote to the shard, which autograd did not see."""
        self.layout.writes.add(operator, self.name)
        increment_version(self.layout.shards[self.buffer.key])

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gathers the whole parameter from each rank's part: ``[part.numel]`` -> the parameter's shape. Collective."""
        mesh, plan = self.layout.mesh, self.layout.plan
        flat = local.to(plan.device)
        if plan.placement.parameter and plan.shard > 1:
            sizes = [part.numel for part in plan.parts(self.buffer, self.slot)]
            packed = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
            padded = packed.new_zeros(max(sizes))
            padded[: packed.numel()] = packed
            rows = gather_shards(padded, mesh).view(len(sizes), -1)
            flat = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).view(flat.dtype)
        parts = gather_parts(flat, mesh) if self.leaf.split else [flat]
        return whole_value([self.leaf.in_shape(part) for part in parts], self.leaf).to(local.device)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole: the parameter's shape -> ``[part.numel]``."""
        mesh = self.layout.mesh
        value = part_of(whole, self.leaf, mesh.tp, mesh.tp_rank) if self.leaf.split else whole
        return self.leaf.in_memory_order(value)[self.part.first : self.part.last]


def places_of(layout: Layout, buffer: Buffer) -> Iterator[ShardPlace]:
    """This rank's place of each of a buffer's slots."""
    plan = layout.plan
    for slot in buffer.slots:
        yield ShardPlace(
            layout, buffer, slot, plan.part(buffer, slot, layout.mesh.shard_rank, plan.placement.parameter)
        )
