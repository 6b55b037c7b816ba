"""Merges small neighbours among the modules that the user marked: they are gathered and reduced together.

    marked     layers.0 0.2 | layers.1 0.2 | layers.2 0.2 | ...    MiB; each has flat shards of its own
    memory     [ layers.0 | layers.1 | layers.2 ]  ...              neighbours' flat shards, side by side
    units      layers.0-2 0.6 | ...                                 one collective each

`fully_shard` calls `merge` when it is called on the modules around them. `merge` lays flat shards side by side by the
rule of `compile_sharded` (`plan.buckets`), within a bound on memory. Flat shards side by side are one buffer of a plan
as long as their modules have the same settings. Each module keeps its own flat shards, so unsharding, held-back
gradients and writes stay separate for each module that the user marked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import nn

from fsdp_compiled.plan.buckets import MIB, regroup, target
from fsdp_compiled.plan.hardware import machine_of
from fsdp_compiled.plan.units import ROOT
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.fsdp.parameter_group import Entry, FlatShard, ParameterGroup

# Automatic merging never makes a unit larger than one in so many parts of the model. PyTorch's own kernels keep as much
# for backward as FSDP2 does: so that the peak is no higher, they have smaller units, and in the first half of the model
# alone, since memory is at its highest where forward ends and backward begins. Inductor keeps less, which leaves room
# for larger units throughout. Gathers start one unit ahead here, whatever that takes, so units are smaller than in a
# plan. In a small model FSDP2's root and block are a larger fraction, which leaves more room: the peak of 12, 24 and 48
# layers of width 64 is then 0.92, 0.98 and 0.97 of FSDP2's; with 6 units throughout that of 48 would be 1.01.
MOST_UNITS = {"eager": 12, "inductor": 8}
FEW_UNITS, SMALL = 6, 6 * MIB  # under Inductor, of models of so many bytes on the wire


@dataclass(frozen=True)
class Row:
    """Flat shards side by side in memory, as one buffer of a plan."""

    flats: tuple[FlatShard, ...]

    @cached_property
    def tensor(self) -> torch.Tensor:
        """One tensor over all these flat shards."""
        first = self.flats[0].tensor
        size = sum(flat.tensor.numel() for flat in self.flats)
        return first if len(self.flats) == 1 else first.as_strided((size,), (1,), first.storage_offset())

    @property
    def current(self) -> bool:
        return all(flat.current for flat in self.flats)

    @property
    def waits(self) -> bool:
        """Whether any of these flat shards holds back gradients for a later backward."""
        return any(flat.waits for flat in self.flats)

    @cached_property
    def starts(self) -> tuple[tuple[FlatShard, int], ...]:
        """Each flat shard, with the offset at which it begins in the row."""
        found, start = [], 0
        for flat in self.flats:
            found.append((flat, start))
            start += flat.tensor.numel()
        return tuple(found)

    @property
    def entries(self) -> list[Entry]:
        return [entry for flat in self.flats for entry in flat.entries]

    def release(
        self, world: int, flats: Collection[FlatShard]
    ) -> tuple[torch.Tensor, list[tuple[FlatShard, int, list[Entry]]]]:
        """The gradients that these flat shards held back, ``[world * n]``, and each one's offset in the row and its
        parameters. They hold nothing back afterwards."""
        like = next(flat.held for flat in flats if flat.held is not None)
        parts: list[torch.Tensor] = []
        entries: list[tuple[FlatShard, int, list[Entry]]] = []
        for flat, start in self.starts:
            if flat.held is None or flat not in flats:
                parts.append(like.new_zeros(world, flat.tensor.numel()))
            else:
                held, own = flat.release()
                parts.append(held.view(world, -1))
                entries.append((flat, start, own))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).reshape(-1), entries


def rows(groups: Iterable[ParameterGroup]) -> Iterator[tuple[list[ParameterGroup], list[Row]]]:
    """These groups in order, split into runs that are gathered together, each with its rows of flat shards."""
    run: list[ParameterGroup] = []
    for group in groups:
        if not group.flats:
            continue
        if run and not _is_next(run[-1], group):
            yield run, _rows(run)
            run = []
        run.append(group)
    if run:
        yield run, _rows(run)


def _rows(run: Sequence[ParameterGroup]) -> list[Row]:
    return [Row(flats) for flats in zip(*(group.flats for group in run), strict=True)]


def _is_next(first: ParameterGroup, second: ParameterGroup) -> bool:
    """Whether the second group's flat shards lie right behind those of the first, and both have the same settings."""
    return (
        _alike(first, second)
        and [_trained(flat) for flat in first.flats] == [_trained(flat) for flat in second.flats]
        and all(_behind(one, other) for one, other in zip(first.flats, second.flats, strict=True))
    )


def _behind(first: FlatShard, second: FlatShard) -> bool:
    one, other = first.tensor, second.tensor
    together = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return together and one.storage_offset() + one.numel() == other.storage_offset()


def _trained(flat: FlatShard) -> bool:
    return any(entry.parameter.requires_grad for entry in flat.entries)


def _alike(first: ParameterGroup, second: ParameterGroup) -> bool:
    """Whether these two groups may share collectives."""
    return (
        first.device_mesh == second.device_mesh
        and first.reshard_after_forward == second.reshard_after_forward
        and first.division == second.division
        and (first.all_reduce_hook is None) == (second.all_reduce_hook is None)
        and [first.precision.param_dtype, first.precision.reduce_dtype]
        == [second.precision.param_dtype, second.precision.reduce_dtype]
        and [_kind(flat) for flat in first.flats] == [_kind(flat) for flat in second.flats]
    )


def _kind(flat: FlatShard) -> tuple[torch.dtype, torch.device, bool, bool]:
    return flat.tensor.dtype, flat.tensor.device, flat.buffer.split, _trained(flat)


def merge(module: nn.Module, groups: Sequence[ParameterGroup], policy: Policy) -> str:
    """Lays flat shards of small neighbours among these groups side by side. Returns the reason, as text for people."""
    groups = [group for group in groups if group.flats]
    if not groups or groups[0].mesh.shard == 1:
        return ""
    mesh = groups[0].mesh
    paths = {id(one): path for path, one in module.named_modules()}
    names = [paths.get(id(group.modules[0]), "") or ROOT for group in groups]
    sizes = [sum(_wire_bytes(flat, group) for flat in group.flats) for group in groups]
    machine = machine_of(mesh.device, policy.network, mesh.tp)
    few = policy.lower == "inductor" and sum(sizes) <= SMALL
    parts = FEW_UNITS if few else MOST_UNITS[policy.lower]
    most, _, reason = target(policy.bucket_mb, names, sizes, machine, mesh.world, True, parts, mesh.tp)
    early = len(names)
    if policy.bucket_mb == "auto" and policy.lower == "eager":
        early = sum(2 * (total - size) <= sum(sizes) for total, size in zip(accumulate(sizes), sizes, strict=True)) - 1
        reason += ", in the first half of it"
    # A root merged with its neighbour would keep it gathered from the beginning of forward to the end of backward.
    first = int(policy.bucket_mb == "auto" and names[0] == ROOT)
    early = max(early, first)
    among = regroup(names[first:early], sizes[first:early], most, float("inf"), True)
    units = [*names[:first], *among, *names[early:]]
    for _, together in groupby(zip(units, groups, strict=True), key=lambda one: one[0]):
        run: list[ParameterGroup] = []
        for _, group in together:
            if run and not _alike(run[-1], group):
                _lay_side_by_side(run)
                run = []
            run.append(group)
        _lay_side_by_side(run)
    return reason


def _wire_bytes(flat: FlatShard, group: ParameterGroup) -> int:
    dtype = group.precision.param_dtype if flat.tensor.is_floating_point() else None
    return flat.buffer.numel * (dtype or flat.tensor.dtype).itemsize


def _lay_side_by_side(run: Sequence[ParameterGroup]) -> None:
    """Moves the groups' flat shards side by side into new memory, unless they lie so already, hold back gradients, or
    are unsharded."""
    if len(run) == 1 or all(_is_next(one, other) for one, other in pairwise(run)):
        return
    if any(group.unsharded or any(flat.waits for flat in group.flats) for group in run):
        return
    places: dict[FlatShard, torch.Tensor] = {}
    for row in _rows(run):
        size = sum(flat.tensor.numel() for flat in row.flats)
        memory = torch.empty(size, dtype=row.flats[0].tensor.dtype, device=row.flats[0].tensor.device)
        for flat, start in row.starts:
            # `.data` gives each its own version counter: a write to one does not count as a write to the others.
            places[flat] = memory[start : start + flat.tensor.numel()].data
    for group in run:
        group.move(places)
