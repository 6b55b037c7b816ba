"""Prints a plan, and numbers of bytes, for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fsdp_compiled.plan.owners import update_cost

if TYPE_CHECKING:
    from fsdp_compiled.plan.plan import Buffer, Plan


def human(nbytes: float) -> str:
    """``1536`` -> ``'1.5 KiB'``."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or suffix == "GiB":
            return f"{nbytes:.0f} B" if suffix == "B" else f"{nbytes:.1f} {suffix}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def _kind(buffer: Buffer) -> str:
    if not buffer.trainable:
        return "frozen"
    return "no optimizer" if buffer.group is None else f"group {buffer.group}"


def _tensor_parallel(plan: Plan) -> list[str]:
    """What is cut over the tp axis, and what ranks along it have whole."""
    if plan.tp == 1:
        return []
    split, whole = ([s for b in plan.buffers if b.split == cut for s in b.slots] for cut in (True, False))
    held = sum(plan.shard_numel(b) * b.dtype.itemsize for b in plan.buffers if not b.split)
    return [
        f"tensor parallelism: {len(split)} parameters cut over {plan.tp} ranks (sizes above are of a rank's parts), "
        f"{len(whole)} whole on each, of which a rank holds {human(held)}"
    ]


def _whole_updates(plan: Plan) -> list[str]:
    """Who updates what is updated whole, how evenly, and what that sends."""
    if not (owned := plan._owned):
        return []
    what = f"updated whole: {len(owned)} parameters"
    if not plan.owners:
        return [f"{what}, by every rank for itself" if plan.world > 1 else what]
    costs, counts, sent = [0.0] * plan.shard, [0] * plan.shard, 0.0
    for slot, held in owned:
        owner = plan.owners[slot.name]
        costs[owner] += update_cost(slot.leaf.shape)
        counts[owner] += 1
        sent += (sum(held) - held[owner]) * slot.leaf.dtype.itemsize / plan.shard
    return [
        f"{what}, each by its owner: {min(counts)} to {max(counts)} a rank, the most work is "
        f"{max(costs) / (sum(costs) / plan.shard):.2f} times the mean; a step sends {human(2 * sent)} a rank to owners "
        f"and {human(sent)} back, on average"
    ]


def describe(plan: Plan) -> list[str]:
    total = sum(math.prod(slot.leaf.whole_shape) for buffer in plan.buffers for slot in buffer.slots)
    lines = [
        f"plan: {plan.policy.shard} on {plan.shard} rank{'s' * (plan.shard > 1)}"
        + (f" x {plan.replicate} replicas" if plan.replicate > 1 else "")
        + (f" x {plan.tp} tensor-parallel" if plan.tp > 1 else "")
        + f", {len(plan.units)} units, {total:,} parameters, of which a rank holds {human(plan.persistent_bytes)}",
        f"{'unit':<24}{'buffer':<20}{'parameters':>12}{'gathered':>12}{'a rank holds':>14}{'padding':>9}",
    ]
    for unit in plan.units:
        for index, buffer in enumerate(unit.buffers):
            lines.append(
                f"{unit.name if index == 0 else '':<24}{str(buffer.dtype)[6:] + ', ' + _kind(buffer):<20}"
                f"{len(buffer.slots):>12}{human(buffer.nbytes):>12}"
                f"{human(plan.shard_numel(buffer) * buffer.dtype.itemsize):>14}{buffer.padding:>9}"
            )
    lines += _tensor_parallel(plan)
    lines += _whole_updates(plan)
    lines += [f"chosen: {note}" for note in plan.notes]
    if held := plan.copy_bytes:
        lines.append(f"shards in the compute dtype, for gathers without a cast (copies): {human(held)} more a rank")
    if held := plan.sum_bytes():
        kept = plan.policy.accumulate
        other = "full" if kept == "shards" else "shards"
        instead = plan.sum_bytes(other)
        note = f"; under {other!r} it would be {human(instead)}" if instead != held else ""
        lines.append(f"while microbatches are added up (accumulate={kept!r}): {human(held)} more a rank{note}")
    return lines


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
