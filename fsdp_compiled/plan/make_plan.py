"""Makes the plan: which parameters form a unit, and where each lies in its unit's flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp_compiled.plan.buckets import MOST_BUCKETS, MOST_UNITS, apart_of, regroup, target
from fsdp_compiled.plan.hardware import Cluster, machine_of
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.owners import laid_out
from fsdp_compiled.plan.plan import Buffer, Plan, Slot, Unit
from fsdp_compiled.policy import Policy

ALIGNMENT = 128  # bytes: a parameter starts at a multiple of it, so that vector loads of any width are aligned
SLICE = 16  # bytes: a rank's slice is a multiple of it
SCALED = 128  # elements that share a scale on the wire (`Policy.wire`), as in `kernels.reference`


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _lay_out(unit: str, key: str, leaves: Sequence[Leaf], world: int, scaled: int) -> Buffer:
    """Lays parameters end to end, each at an aligned place, and pads to whole slices. ``scaled``: how many elements
    share a scale on the wire; they must be of one parameter and of one rank."""
    first = leaves[0]
    itemsize = first.dtype.itemsize
    slots, end = [], 0
    for leaf in leaves:
        slots.append(Slot(leaf, _round_up(end, max(ALIGNMENT // itemsize, scaled))))
        end = slots[-1].end
    numel = _round_up(max(end, 1), world * max(SLICE // itemsize, scaled))  # a collective of nothing is not possible
    return Buffer(key, unit, first.dtype, first.trainable, first.group, tuple(slots), numel, split=first.split)


def _order(leaves: Sequence[Leaf], plan: Plan, place: int) -> Sequence[Leaf]:
    """The order of one buffer's parameters: as given, except where owners update all of them whole (`laid_out`).
    ``place``: of its unit. Every other unit is laid out in reverse: of two equal blocks, a rank then has more of a
    parameter in one and less of it in the other, so that owners with equal work hold the most of what they own."""
    if plan.shard == 1 or not plan.placement.state or not all(leaf.owned for leaf in leaves):
        return leaves
    order = laid_out([leaf.numel for leaf in leaves], plan.shard)
    return [leaves[index] for index in (order[::-1] if place % 2 else order)]


def _wire_bytes(leaf: Leaf, policy: Policy) -> int:
    if policy.wire and leaf.dtype.is_floating_point:
        return leaf.numel  # the scales are left out
    dtype = policy.precision.param_dtype if leaf.dtype.is_floating_point else None
    return leaf.numel * (dtype or leaf.dtype).itemsize


def make_plan(
    leaves: Sequence[Leaf],
    policy: Policy,
    device: torch.device,
    shard: int = 1,
    replicate: int = 1,
    tp: int = 1,
    machine: Cluster | None = None,
) -> Plan:
    """Groups the leaves, given in registration order, into units and lays their buffers out.

    `Policy.bucket_mb` decides which blocks form a unit; the plan's notes say how. ``machine``: the hardware to plan
    for, instead of the device's. Raises ``ValueError`` where ranks do not divide by `Policy.reshard_onto`.

    A buffer keeps the registration order, because an element's place decides the order in which a ring reduction sums
    it, and so its last bits. Only a buffer of parameters that are updated whole has another order (`laid_out`).
    """
    machine = machine or machine_of(device, policy.network, tp)
    if policy.reshard_onto is not None and shard > policy.reshard_onto and shard % policy.reshard_onto:
        raise ValueError(
            f"Policy.reshard_onto={policy.reshard_onto} does not divide the {shard} ranks along the shard axis. Give a "
            "divisor, as the ranks of one node."
        )
    gathered = policy.placement.parameter and shard > 1
    blocks, sizes = [leaf.block for leaf in leaves], [_wire_bytes(leaf, policy) for leaf in leaves]
    most = MOST_UNITS[policy.lower] if gathered else MOST_BUCKETS
    merge, split, reason = target(policy.bucket_mb, blocks, sizes, machine, shard * replicate, gathered, most, tp)
    apart = apart_of(policy.bucket_mb, policy.lower, sizes)
    if gathered and apart:
        reason += ", and the last as they are"
    by_unit: dict[str, dict[tuple[torch.dtype, bool, int | None, bool], list[Leaf]]] = {}
    efficient = most * merge < sum(sizes)  # otherwise messages are small anyway
    grouped = regroup(blocks, sizes, merge, split, gathered, apart, cut_root=efficient and tp == 1)
    for leaf, unit in zip(leaves, grouped, strict=True):
        kind = (leaf.dtype, leaf.trainable, leaf.group if leaf.trainable else None, leaf.split)
        by_unit.setdefault(unit, {}).setdefault(kind, []).append(leaf)
    bare = Plan((), policy, device, shard, replicate, machine, (reason,), tp)
    units = []
    for place, (name, kinds) in enumerate(by_unit.items()):
        keys = [name if len(kinds) == 1 else f"{name}#{index}" for index in range(len(kinds))]
        buffers = tuple(
            _lay_out(name, key, _order(members, bare, place), shard, SCALED if policy.wire else 1)
            for key, members in zip(keys, kinds.values(), strict=True)
        )
        units.append(Unit(name, buffers, policy.reshard_onto or True))
    return replace(bare, units=tuple(units))
