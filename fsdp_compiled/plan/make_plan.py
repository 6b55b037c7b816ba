"""Leaves -> Plan: which of them make a unit, and where each lies in its unit's flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp_compiled.plan.buckets import MOST_BUCKETS, MOST_UNITS, apart_of, regroup, target
from fsdp_compiled.plan.hardware import Machine, machine_of
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.owners import rows_of
from fsdp_compiled.plan.plan import Buffer, Plan, Slot, Unit
from fsdp_compiled.policy import Policy

ALIGNMENT = 128  # bytes: where a parameter may start, so that vector loads of any width are aligned
SLICE = 16  # bytes: what a rank's slice is a multiple of


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _lay_out(unit: str, key: str, rows: Sequence[Sequence[Leaf]], world: int) -> Buffer:
    """``rows``: one, whose end is padded, or one for each rank, each in its slice."""
    first = next(leaf for row in rows for leaf in row)
    itemsize = first.dtype.itemsize
    aligned = max(ALIGNMENT // itemsize, 1)
    places: list[list[tuple[Leaf, int]]] = []
    longest = 0
    for row in rows:
        offset = 0
        places.append([])
        for leaf in row:
            offset = _round_up(offset, aligned)
            places[-1].append((leaf, offset))
            offset += leaf.numel
        longest = max(longest, offset)
    apart = len(rows) > 1
    each = _round_up(longest, aligned)
    slots = tuple(Slot(leaf, rank * each + offset) for rank, row in enumerate(places) for leaf, offset in row)
    # Nothing is a collective of nothing.
    numel = world * each if apart else _round_up(max(longest, 1), world * max(SLICE // itemsize, 1))
    return Buffer(
        key, unit, first.dtype, first.trainable, first.group, slots, numel, first.variant,
        split=first.split, apart=apart,
    )  # fmt: skip


def _rows(leaves: Sequence[Leaf], plan: Plan, place: int) -> list[list[Leaf]]:
    """Of one buffer, at its place among the units: as given, but for what ranks own whole (`rows_of`). Every other one
    is laid out from its end: what a rank has more of in one of two equal blocks it has less of in the other, so that
    owners with as much to do as others hold the most of theirs."""
    if plan.shard == 1 or not plan.placement.state or not all(leaf.owned for leaf in leaves):
        return [list(leaves)]
    rows = rows_of([leaf.numel for leaf in leaves], plan.shard, plan.pairs)
    if place % 2:
        rows = [row[::-1] for row in reversed(rows)]
    return [[leaves[index] for index in row] for row in rows]


def _wire_bytes(leaf: Leaf, policy: Policy) -> int:
    dtype = policy.precision.param_dtype if leaf.dtype.is_floating_point else None
    return leaf.numel * (dtype or leaf.dtype).itemsize


def make_plan(
    leaves: Sequence[Leaf],
    policy: Policy,
    device: torch.device,
    shard: int = 1,
    replicate: int = 1,
    tp: int = 1,
    machine: Machine | None = None,
) -> Plan:
    """Groups the leaves, given in registration order, into units and lays their buffers out.

    Which blocks make a unit is chosen by `Policy.bucket_mb`, and said in the plan's notes. ``machine``: another than
    the device is taken for.

    Registration order is kept inside a buffer, because the place of an element decides the order in which a ring
    reduction sums it, and so its last bits. Only where parameters are updated whole is another taken (`rows_of`).
    """
    machine = machine or machine_of(device, shard * replicate * tp, policy.bandwidth_gbps, tp)
    gathered = policy.placement.parameter and shard > 1
    blocks, sizes = [leaf.block for leaf in leaves], [_wire_bytes(leaf, policy) for leaf in leaves]
    most = MOST_UNITS[policy.lower] if gathered else MOST_BUCKETS
    merge, split, reason = target(policy.bucket_mb, blocks, sizes, machine, shard * replicate, gathered, most)
    apart = apart_of(policy.bucket_mb, policy.lower, sizes)
    if gathered and apart:
        reason += ", and the last as they are"
    by_unit: dict[str, dict[tuple[torch.dtype, bool, int | None, int, bool], list[Leaf]]] = {}
    for leaf, unit in zip(leaves, regroup(blocks, sizes, merge, split, gathered, apart), strict=True):
        kind = (leaf.dtype, leaf.trainable, *((leaf.group, leaf.variant) if leaf.trainable else (None, 0)), leaf.split)
        by_unit.setdefault(unit, {}).setdefault(kind, []).append(leaf)
    bare = Plan((), policy, device, shard, replicate, machine, (reason,), tp)
    units = []
    for place, (name, kinds) in enumerate(by_unit.items()):
        keys = [name if len(kinds) == 1 else f"{name}#{index}" for index in range(len(kinds))]
        buffers = tuple(
            _lay_out(name, key, _rows(members, bare, place), shard)
            for key, members in zip(keys, kinds.values(), strict=True)
        )
        units.append(Unit(name, buffers))
    return replace(bare, units=tuple(units))
