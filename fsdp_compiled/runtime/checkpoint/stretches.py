"""Which elements of which tensors this rank holds: its flat shards, by the model's own names.

    buffer layers.0 (64 elements), rank 1 of 2:  [32, 64)
        layers.0.weight at 0..48     ->  model.layers.0.weight [32, 48)
        layers.0.bias at 48..56      ->  model.layers.0.bias [0, 8)

Elements count in the parameter's memory order. Names are ``model.<parameter>`` and
``optimizer.state.<parameter>.<name>``, whatever unit, buffer and rank the elements lie in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_compiled.optim.rule import Rule, rule_for
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.runtime.checkpoint.manifest import Entry

GRAIN = 64  # elements: replicas share a shard's elements in multiples of it


@dataclass(frozen=True)
class Stretch:
    """Elements ``[start, stop)`` of a tensor; ``values`` are they, a flat view of the state."""

    name: str
    start: int
    stop: int
    values: torch.Tensor


@dataclass(frozen=True)
class Holders:
    """This rank's place among the ranks that hold the same elements."""

    rank: int
    world: int
    replica: int
    replicas: int

    def share(self, cut: bool) -> tuple[int, int]:
        """Which part, of how many, of the elements that it holds are this rank's to write."""
        return (self.replica, self.replicas) if cut else (self.rank, self.world)


def parameter_name(slot: Slot) -> str:
    return f"model.{slot.name}"


def state_name(slot: Slot, name: str) -> str:
    return f"optimizer.state.{slot.name}.{name}"


def per_element(buffer: Buffer, rules: Sequence[Rule]) -> list[str]:
    """The names of the optimizer's state that has an element for each of the buffer's."""
    if not buffer.updated or not rules:
        return []
    assert buffer.group is not None
    return [entry.name for entry in rule_for(rules, buffer.group, buffer.variant).state if not entry.scalar]


def tensors(plan: Plan, rules: Sequence[Rule], optimizer: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Every tensor that the ranks hold together, without pieces."""
    found: dict[str, Entry] = {}
    for buffer in plan.buffers:
        for slot in buffer.slots:
            leaf = slot.leaf
            found[parameter_name(slot)] = Entry(leaf.shape, leaf.dtype, leaf.order)
            for name in per_element(buffer, rules):
                found[state_name(slot, name)] = Entry(leaf.shape, optimizer[f"{buffer.key}.{name}"].dtype, leaf.order)
    return found


def aliases(plan: Plan) -> dict[str, str]:
    """Other names of tied parameters, each with the first."""
    return {name: slot.name for b in plan.buffers for slot in b.slots for name in slot.leaf.names[1:]}


def held(
    plan: Plan,
    rules: Sequence[Rule],
    shard_rank: int,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    holders: Holders | None = None,
) -> Iterator[Stretch]:
    """What this rank holds; with ``holders``, what of that it writes, so that all ranks write each element once."""
    placement = plan.placement
    for buffer in plan.buffers:
        yield from _cut(buffer, None, parameters[buffer.key], shard_rank, placement.parameter, holders)
        for name in per_element(buffer, rules):
            yield from _cut(buffer, name, optimizer[f"{buffer.key}.{name}"], shard_rank, placement.state, holders)


def _cut(
    buffer: Buffer, name: str | None, values: torch.Tensor, shard_rank: int, cut: bool, holders: Holders | None
) -> Iterator[Stretch]:
    size = values.numel()
    begin = shard_rank * size if cut else 0
    part, parts = holders.share(cut) if holders is not None else (0, 1)
    grains = -(-size // GRAIN)
    first, last = begin + grains * part // parts * GRAIN, begin + min(grains * (part + 1) // parts * GRAIN, size)
    for slot in buffer.slots:
        start, stop = slot.within(first, last)
        if start < stop:
            tensor = parameter_name(slot) if name is None else state_name(slot, name)
            yield Stretch(tensor, start - slot.offset, stop - slot.offset, values[start - begin : stop - begin])
