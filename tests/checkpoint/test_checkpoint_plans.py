"""What the ranks of one plan write, the ranks of any other read: generated parameters and plans, in one process.

Along the tp axis each plan cuts other parameters along other dims, into other numbers of parts, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled import Policy
from fsdp_compiled.distributed.mesh import Mesh, lockstep
from fsdp_compiled.plan.leaf import Leaf, TensorParallel, dense_stride
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint import loading
from fsdp_compiled.runtime.checkpoint.chunks import held, rectangles
from tests.saved_plans import CPU, RULES, places, save, shards, values

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


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
            wanted = list(held(second, RULES, place, parameters, optimizer))
            work = loading.read(Path(name), manifest, Mesh(CPU), wanted, [])
            loading.write(lockstep(Mesh(CPU), "it", work)[0])
            for made, right in zip((parameters, optimizer), expected):
                used = {key for key in made if key in right and _updated(second, key)}
                assert all(torch.equal(made[key], right[key]) for key in used)


def _updated(plan: Plan, key: str) -> bool:
    """Whether a shard is one that there is: state of what is not trained is none."""
    return any(key == b.key or (b.updated and key.startswith(f"{b.key}.exp")) for b in plan.buffers)


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_rectangles_are_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    whole = torch.arange(int(torch.Size(shape).numel())).reshape([shape[dim] for dim in order]).permute(back)
    stop = data.draw(st.integers(0, whole.numel()))
    start = data.draw(st.integers(0, stop))
    seen: list[int] = []
    found = list(rectangles(shape, order, start, stop))
    for first, offsets, sizes in found:
        there = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].permute(order).flatten().tolist()
        assert there == list(range(first, first + len(there)))
        seen += there
    assert seen == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
