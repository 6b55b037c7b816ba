"""What the ranks of one plan write, the ranks of any other read: generated parameters and plans, in one process.

Along the tp axis each plan cuts other parameters along other dims, into other numbers of parts, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled import Policy
from fsdp_compiled.distributed.lockstep import lockstep
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.optim.rule import Rule, StateTensor
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Leaf, Plan, TensorParallel, dense_stride
from fsdp_compiled.runtime.checkpoint import data_file, loading, writing
from fsdp_compiled.runtime.checkpoint.image import Image, arrange, described, part
from fsdp_compiled.runtime.checkpoint.loading import Wanted
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.rectangles import rectangles
from fsdp_compiled.runtime.checkpoint.stretches import Holders, Place, held, tensors
from fsdp_compiled.runtime.shard_model import write_slot

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
STATE = (
    StateTensor("exp_avg", False, 0.0, torch.float32),
    StateTensor("exp_avg_sq", False, 0.0, None),
    StateTensor("step", True, 0.0, torch.float32),
)
RULES = [Rule(group, "AdamW", STATE, (), lambda *_: None) for group in range(2)]  # type: ignore[arg-type, return-value]


@st.composite
def leaves(draw: st.DrawFn) -> list[Leaf]:
    """Odd sizes, empty ones, numbers, memory in another order than the dims, frozen ones, groups, dtypes, blocks."""
    found = []
    for index in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        order = draw(st.permutations(range(len(shape))))
        stride = (
            torch.empty([shape[dim] for dim in order]).permute([order.index(d) for d in range(len(shape))]).stride()
        )
        trainable = draw(st.booleans())
        group = draw(st.sampled_from([None, 0, 1]))
        dtype = draw(st.sampled_from(DTYPES))
        block = f"layers.{draw(st.integers(0, 2))}"
        found.append(Leaf((f"{block}.p{index}",), shape, stride, dtype, trainable, group, block))
    return found


@st.composite
def plans(draw: st.DrawFn, found: Sequence[Leaf]) -> Plan:
    policy = Policy(
        lower="eager",
        shard=draw(st.sampled_from(["zero3", "zero2", "zero1", "ddp"])),
        bucket_mb=draw(st.sampled_from([0, 0.0001, 1])),
    )
    tp = draw(st.sampled_from([1, 1, 2, 3]))
    parts = [draw(part_of(leaf, tp)) for leaf in found]
    return make_plan(parts, policy, CPU, draw(st.integers(1, 5)), draw(st.integers(1, 2)), tp)


@st.composite
def part_of(draw: st.DrawFn, leaf: Leaf, tp: int) -> Leaf:
    """The leaf as ranks along tp have it: cut along a dim, or whole."""
    dims = [dim for dim, size in enumerate(leaf.shape) if tp > 1 and size and size % tp == 0]
    dim = draw(st.sampled_from([*dims, None]))
    if dim is None:
        return leaf if tp == 1 else replace(leaf, tp=draw(st.sampled_from([None, TensorParallel(None, leaf.shape)])))
    shape = tuple(size // tp if one == dim else size for one, size in enumerate(leaf.shape))
    laid = torch.empty([shape[one] for one in leaf.order]).permute([leaf.order.index(d) for d in range(len(shape))])
    return replace(leaf, shape=shape, stride=dense_stride(shape, laid.stride()), tp=TensorParallel(dim, leaf.shape))


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
                write_slot(flat, slot, value)
            size = buffer.numel // plan.shard
            own = flat[place.shard * size : (place.shard + 1) * size].clone() if cut else flat
            (optimizer if name else parameters)[f"{buffer.key}.{name}" if name else buffer.key] = own
    return parameters, optimizer


def save(plan: Plan, whole: dict[str, torch.Tensor], folder: Path) -> Manifest:
    parts, entries = [], {}
    for rank, place in enumerate(places(plan)):
        parameters, optimizer = shards(plan, place, whole)
        entries = tensors(plan, RULES, optimizer)
        own = list(held(plan, RULES, place, parameters, optimizer, Holders(rank, places(plan))))
        shapes = {name: entry.shape for name, entry in entries.items() if list(entry.order) == sorted(entry.order)}
        cut = [part(o.name, o.start, o.values, entries[o.name].shape, o.cut) for o in own]
        files = arrange(cut, shapes, rank, len(places(plan)))
        images = Image(CPU).fill(files)
        sums = [data_file.write(folder / file.name, image) for file, image in zip(files, images)]
        parts.append({**described(files, sums), "values": {}, "shapes": {}})
    made = writing.Save(1, folder, 0, None, len(places(plan)), entries, {}, {}, {})
    return writing.assemble(made, parts)  # raises where an element is missing or written twice


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_plan_reads_what_any_other_wrote(data: st.DataObject) -> None:
    found = data.draw(leaves())
    first, second = data.draw(plans(found)), data.draw(plans(found))
    whole = values(found)
    with TemporaryDirectory() as name:
        manifest = save(first, whole, Path(name))
        for place in dict.fromkeys(places(second)):
            parameters, optimizer = shards(second, place, None)
            expected = shards(second, place, whole)
            orders = {n: entry.order for n, entry in tensors(second, RULES, optimizer).items()}
            wanted = [
                Wanted(one.name, one.start, one.stop, orders[one.name], one.values, one.cut)
                for one in held(second, RULES, place, parameters, optimizer)
            ]
            work = loading.read(Path(name), manifest, Mesh(CPU), wanted, [])
            loading.write(lockstep(Mesh(CPU), "it", work))
            for made, right in zip((parameters, optimizer), expected):
                used = {key for key in made if key in right and _updated(second, key)}
                assert all(torch.equal(made[key], right[key]) for key in used)


def _updated(plan: Plan, key: str) -> bool:
    """Whether a shard is one that there is: state of what is not trained is none."""
    return any(key == b.key or (b.updated and key.startswith(f"{b.key}.exp")) for b in plan.buffers)


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_rectangles_are_the_stretch(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(int(torch.Size(shape).numel())).reshape(shape)
    stop = data.draw(st.integers(0, whole.numel()))
    start = data.draw(st.integers(0, stop))
    seen: list[int] = []
    found = list(rectangles(shape, start, stop))
    for offsets, sizes, first in found:
        there = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].flatten().tolist()
        assert there == list(range(first, first + len(there)))
        seen += there
    assert seen == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
