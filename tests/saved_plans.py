"""What the ranks of a plan write, one after the other in one process: made-up values in shards of any plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.optim.rule import Rule, StateTensor
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint import data_file, writing
from fsdp_compiled.runtime.checkpoint.chunks import Holders, Place, held, tensors
from fsdp_compiled.runtime.checkpoint.manifest import Manifest, merged
from fsdp_compiled.runtime.checkpoint.saving import Image, Save, Written, arrange

CPU = torch.device("cpu")
STATE = (
    StateTensor("exp_avg", False, 0.0, torch.float32),
    StateTensor("exp_avg_sq", False, 0.0, None),
    StateTensor("step", True, 0.0, torch.float32),
)
RULES = [Rule(group, "AdamW", STATE, (), lambda *_: None) for group in range(2)]  # type: ignore[arg-type, return-value]


def places(plan: Plan) -> list[Place]:
    """Of all ranks: replicas, then the shard axis, then tp."""
    return [
        Place(shard, tp) for _ in range(plan.replicate) for shard in range(plan.shard) for tp in range(plan.tp)
    ]  # fmt: skip


def values(found: Sequence[Leaf]) -> dict[str, torch.Tensor]:
    """A value for every element of every tensor, unlike all others."""
    made, count = {}, 0
    for leaf in found:
        for name, dtype in (("", leaf.dtype), (".exp_avg", torch.float32), (".exp_avg_sq", leaf.dtype)):
            numbers = torch.arange(count, count + leaf.numel, dtype=torch.float64) % 251  # exact in bfloat16
            made[leaf.names[0] + name], count = numbers.reshape(leaf.shape).to(dtype), count + leaf.numel
    return made


def shards(plan: Plan, place: Place, whole: dict[str, torch.Tensor] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rank's parameters and optimizer state: these values, or zeros."""
    parameters: dict[str, torch.Tensor] = {}
    optimizer: dict[str, torch.Tensor] = {}
    for buffer in plan.buffers:
        for name, cut in (
            ("", plan.placement.parameter),
            ("exp_avg", plan.placement.state),
            ("exp_avg_sq", plan.placement.state),
        ):
            dtype = torch.float32 if name == "exp_avg" else buffer.dtype
            flat = torch.zeros(buffer.numel, dtype=dtype)
            for slot in buffer.slots if whole is not None else ():
                value = whole[slot.name + (f".{name}" if name else "")]  # type: ignore[index]
                if slot.leaf.split:
                    value = value.chunk(plan.tp, slot.leaf.tp.dim)[place.tp]  # type: ignore[union-attr, arg-type]
                slot.of(flat).copy_(value)
            size = buffer.numel // plan.shard
            own = flat[place.shard * size : (place.shard + 1) * size].clone() if cut else flat
            (optimizer if name else parameters)[f"{buffer.key}.{name}" if name else buffer.key] = own
    return parameters, optimizer


def save(plan: Plan, whole: dict[str, torch.Tensor], folder: Path) -> Manifest:
    parts, world = [], len(places(plan))
    for rank, place in enumerate(places(plan)):
        parameters, optimizer = shards(plan, place, whole)
        head = Manifest(0, world, tensors(plan, RULES, optimizer), {}, {}, {}, {})
        own = list(held(plan, RULES, place, parameters, optimizer, Holders(rank, places(plan))))
        files = arrange(own, [], rank, world)
        images = Image(CPU).fill(files, [])
        sums = [data_file.write(folder / file.name, [image]) for file, image in zip(files, images)]
        made = Save(1, folder, None, False, head, {})
        parts.append(writing.part_of(made, Written(files, {}, []), rank, sums))
    return merged(parts, {})  # raises where an element is missing or written twice
