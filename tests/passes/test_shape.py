"""What a program looks like: how often it sends, when, how much it keeps, and what it computes twice.

``UPDATE_GOLDEN=1 pytest tests/passes/test_shape.py`` writes the texts in tests/golden/ again; read the difference
before you commit it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled import Program
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, is_random, is_wait, role_of
from fsdp_compiled.ir.program import Port
from fsdp_compiled.ir.text import collective_name
from fsdp_compiled.passes.check import check
from fsdp_compiled.plan.plan import Unit
from fsdp_compiled.runtime.parameters.sharded_parameter import is_live
from tests import models
from tests.chosen import chosen
from tests.models import Block
from tests.recipes import built, program_of, recipe
from tests.simulate import enlist, ranks

GOLDEN = Path(__file__).parents[1] / "golden"
aten = torch.ops.aten


def collectives(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and is_collective(node)]


def counts(program: Program) -> dict[str, int]:
    """Collectives by kind; those of the loss and the norm, which belong to no unit, by ``report``."""
    return dict(Counter(collective_name(node) if node.meta["mark"].unit else "report" for node in collectives(program)))


# Counts.


@pytest.mark.parametrize("size", chosen([1, 3], [3]))
@pytest.mark.parametrize(
    ("shard", "gathers", "reduction"),
    [
        ("zero3", lambda units: 2 * units - 1, "reduce_scatter"),
        ("zero2", lambda units: units, "reduce_scatter"),
        ("zero1", lambda units: units, "all_reduce"),
        ("ddp", lambda units: 0, "all_reduce"),
    ],
    ids=["zero3", "zero2", "zero1", "ddp"],
)
def test_a_step_sends_no_more_than_it_must(shard: str, gathers, reduction: str, size: int) -> None:  # type: ignore[no-untyped-def]
    # With a tied head, root is what forward uses last and backward first: the unit that is gathered once.
    what = recipe(shard, *[Block("linear")] * size, tied_head=True, units="pattern")
    units = size + 1
    assert len(built(what)[1].buffers) == units
    expected = {"all_gather": gathers(units), reduction: units, "report": 1}
    assert counts(program_of(what)) == {name: count for name, count in expected.items() if count}


def test_hsdp_reduces_over_both_axes() -> None:
    what = recipe("zero3", replicate=2)
    program, units = program_of(what), len(built(what)[1].units)
    assert counts(program) == {"all_gather": 2 * units - 1, "reduce_scatter": units, "all_reduce": units, "report": 2}
    assert {(collective_name(node), node.args[-1]) for node in collectives(program)} == {
        ("all_gather", "shard"),
        ("reduce_scatter", "shard"),
        ("all_reduce", "shard"),
        ("all_reduce", "replicate"),
    }


def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    what = recipe("zero3", Block("linear"), Block("linear", freeze="all"), Block("linear", freeze="first"))
    plan = built(what)[1]
    reduced = [node.meta["mark"].buffer for node in program_of(what).marked("reduce")]
    assert sorted(reduced) == sorted(buffer.key for buffer in plan.buffers if buffer.trainable)
    assert len(reduced) < len(plan.buffers)


def test_parameters_without_an_optimizer_are_not_reduced_in_a_step() -> None:
    what = recipe("zero2", groups="some")
    plan = built(what)[1]
    reduced = [node.meta["mark"].buffer for node in program_of(what).marked("reduce")]
    assert sorted(reduced) == sorted(buffer.key for buffer in plan.buffers if buffer.updated)
    assert len(reduced) < len(plan.buffers)


@pytest.mark.parametrize("block", ["tied inside", "read twice"])
@pytest.mark.parametrize(("shard", "times"), [("zero3", 2), ("zero2", 1)])
def test_a_weight_that_is_read_twice_is_gathered_once_a_phase(block: str, shard: str, times: int) -> None:
    program = program_of(recipe(shard, Block(block), Block("linear"), units="pattern"))
    assert [node.meta["mark"].unit for node in program.marked("gather")].count("blocks.0") == times
    assert [node.meta["mark"].unit for node in program.marked("reduce")].count("blocks.0") == 1


def test_weights_tied_across_units_live_once_in_the_unit_around_them() -> None:
    apart, tied = recipe("zero2"), recipe("zero2", tied_blocks=True, tied_head=True)
    names = {slot.name: slot.leaf for buffer in built(tied)[1].buffers for slot in buffer.slots}
    assert names["embedding.weight"].names == ("embedding.weight", "head.weight")
    assert names["blocks.0.up.weight"].block == "root"
    assert len(names["blocks.0.up.weight"].names) == 2
    assert counts(program_of(tied)) == counts(program_of(apart))


# What is kept.


@pytest.mark.parametrize(("shard", "replicate"), [("zero3", 1), ("zero2", 1), ("zero1", 1), ("ddp", 1), ("zero3", 2)])
def test_a_rank_holds_its_share_between_steps_and_no_more(shard: str, replicate: int) -> None:
    what = recipe(shard, Block("mixed"), Block("numbers"), optimizer="adamw", replicate=replicate)
    model, optimizer = models.build(what)
    full = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    with ranks(what.shard, replicate) as places:
        crew = [enlist(model, optimizer, what.policy, place) for place in places]
    plan = crew[0].plan
    padding = sum(buffer.padding * buffer.dtype.itemsize for buffer in plan.buffers)
    pieces = what.shard if plan.placement.parameter else 1
    for rank in crew:
        assert all(map(is_live, rank.taken.model.parameters()))
        held = sum(value.untyped_storage().nbytes() for value in rank.named("shard").values())
        assert held == plan.persistent_bytes == (full + padding) // pieces
        for buffer in plan.buffers:
            for name in ("exp_avg", "exp_avg_sq"):
                state = rank.values[Port("in", "state", buffer.key, name)]
                assert state.numel() == buffer.numel // (what.shard if plan.placement.state else 1)


def kept(program: Program, least: int) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Values that backward reads, that forward made of one unit's parameters alone, and that hold as many elements.

    An independent look at what `check` proves: nothing here depends on which operators are views or copies.
    """
    owner: dict[fx.Node, str | None] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == "forward":
            mark = node.meta.get("mark")
            owners = {owner.get(source) for source in node.all_input_nodes}
            made_of = mark.unit if mark else (owners.pop() if len(owners) == 1 else None)
            if made_of is None:
                continue
            owner[node] = made_of
            for user in node.users:
                value = node.meta["val"]
                if user.op == "call_function" and user.meta["phase"] == "backward" and isinstance(value, torch.Tensor):
                    if value.numel() >= least:
                        yield node, user


LEAST = 10  # elements; smaller than every weight, larger than what is computed from weights on the way


@pytest.mark.parametrize("block", chosen(models.BLOCKS, ["attention", "read twice", "nested", "transposed"]))
def test_no_parameter_stays_gathered_across_the_loss(block: str) -> None:
    what = recipe("zero3", *[Block(block)] * 3, tied_head=True, width=3)
    (program,) = [program for program in built(what)[0] if program.history[-1] == "recompute"]
    units = {node.meta.get("mark").unit for node in program.marked("gather") if node.meta["phase"] == "backward"}  # type: ignore[union-attr]
    assert {"blocks.0", "blocks.1", "blocks.2"} <= units
    # The unit at the turn, root, is gathered once and kept: its own values may cross.
    found = [f"{node} for {user}" for node, user in kept(program, LEAST) if _unit(node) != "root"]
    assert not found, found


def _unit(node: fx.Node) -> str:
    while not (mark := node.meta.get("mark")):
        node = node.all_input_nodes[0]
    return mark.unit


def test_under_zero2_parameters_do_stay_gathered() -> None:
    """The control of the test above."""
    what = recipe("zero2", tied_head=True)
    assert any(_unit(node) == "blocks.0" for node, _ in kept(program_of(what), LEAST))
    check(program_of(what), built(what)[1])


# What is computed again.


def count(program: Program, target: object, phase: str) -> int:
    return sum(node.target is target and node.meta["phase"] == phase for node in program.graph.nodes)


@pytest.mark.parametrize("shard", ["zero3", "zero2"])
def test_checkpointed_regions_are_computed_again_and_random_numbers_are_not(shard: str) -> None:
    plain = program_of(recipe(shard, *[Block("dropped")] * 3))
    saved = program_of(recipe(shard, *[Block("dropped", checkpoint=True)] * 3))
    for program, again in ((plain, 0), (saved, 3)):
        # What goes into gelu is computed again; what dropout gave out is kept, so that its mask is.
        assert count(program, aten.addmm.default, "forward") == 6
        assert count(program, aten.addmm.default, "backward") == again
        assert sum(is_random(node) for node in program.graph.nodes) == 3
        assert all(node.meta["phase"] == "forward" for node in program.graph.nodes if is_random(node))


def test_checkpointing_keeps_less_for_backward() -> None:
    def crossing(program: Program) -> int:
        """Elements that forward computes and backward reads."""
        return sum(
            node.meta["val"].numel()
            for node in program.graph.nodes
            if node.op == "call_function"
            and node.meta["phase"] == "forward"
            and isinstance(node.meta["val"], torch.Tensor)
            and any(user.op == "call_function" and user.meta["phase"] == "backward" for user in node.users)
        )

    plain, saved = (program_of(recipe("zero3", *[Block("linear", checkpoint=on)] * 3)) for on in (False, True))
    assert crossing(saved) < crossing(plain)


# When.


def test_at_most_one_flat_gradient_is_on_the_wire() -> None:
    for shard in ("zero3", "zero2", "zero1", "ddp"):
        flying = 0
        for node in program_of(recipe(shard)).graph.nodes:
            flying += role_of(node) == "reduce"
            flying -= role_of(node) == "wait" and role_of(node.args[0]) == "reduce"
            assert flying <= 1


def unwaited(program: Program) -> list[str]:
    """Results of collectives that nothing waits for: each would stay in PyTorch's registry, and its memory with it."""
    found = []
    for node in collectives(program):
        results = len(pytree.tree_leaves(node.meta["val"]))
        parts = [node] if isinstance(node.meta["val"], torch.Tensor) else list(node.users)
        waited = {part.args[1] if part is not node else 0 for part in parts if any(map(is_wait, part.users))}
        if len(waited) < results:
            found.append(f"{node} in {node.meta['phase']}: {len(waited)} of {results}")
    return found


@pytest.mark.parametrize("groups", chosen(["one", "two", "some"], ["some"]))
@pytest.mark.parametrize("shard", ["zero3", "zero2", "zero1", "ddp"])
def test_every_result_of_every_collective_is_waited_for(shard: str, groups: str) -> None:
    found = unwaited(program_of(recipe(shard, groups=groups)))
    assert not found, found


def test_a_collective_that_nothing_waits_for_is_noticed() -> None:
    edit = Edit(program_of(recipe("zero3")))
    wait = next(node for node in edit.graph.nodes if role_of(node) == "wait")
    wait.replace_all_uses_with(wait.args[0])
    assert len(unwaited(edit.done("broken"))) == 1


GOLDENS = {
    "zero3": recipe("zero3"),
    "zero2": recipe("zero2"),
    "zero1": recipe("zero1"),
    "ddp": recipe("ddp"),
    "hsdp": recipe("zero3", replicate=2),
    "ties-and-frozen": recipe(
        "zero3",
        Block("tied inside"),
        Block("linear", freeze="all"),
        Block("read twice", freeze="first"),
        Block("linear", freeze="first"),
        tied_head=True,
        units="pattern",
    ),
}


def wire(program: Program) -> Iterator[str]:
    """The collectives, the waits for them and the compute between, by phase and unit."""
    phase, compute = None, 0
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        sends, waits = is_collective(node), is_wait(node)
        if compute and (sends or waits or node.meta["phase"] != phase):
            yield "    ..."
            compute = 0
        if node.meta["phase"] != phase:
            phase = node.meta["phase"]
            yield phase
        if sends:
            operation = [argument for argument in node.args if argument in ("avg", "sum")]
            name = " ".join([collective_name(node), *operation])
            yield f"    {node.meta['mark'].unit or '(all)':<10}{name} along {node.args[-1]}: {_size(node)}"
        elif waits:
            source = node.all_input_nodes[0]
            name = collective_name(source.all_input_nodes[0] if role_of(source) == "part" else source)
            yield f"    {node.meta['mark'].unit or '(all)':<10}wait for {name}"
        else:
            compute += role_of(node) is None or phase == "update"
    if compute:
        yield "    ..."


def _size(node: fx.Node) -> str:
    sent = [source.meta["val"] for source in node.all_input_nodes]
    got = pytree.tree_leaves(node.meta["val"])
    sizes = [f"{source.numel()} -> {result.numel()}" for source, result in zip(sent, got, strict=True)]
    return f"{str(sent[0].dtype)[6:]} {', '.join(sizes)}"


@pytest.mark.parametrize("name", GOLDENS)
def test_what_is_sent_is_as_written_down(name: str) -> None:
    what = GOLDENS[name]
    ahead = replace(what, policy=replace(what.policy, prefetch=1))  # whatever it takes, as it is by itself on GPUs
    text = "\n".join(wire(program_of(ahead))) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"UPDATE_GOLDEN=1 writes {path.name} again"


def test_the_golden_texts_are_those_that_are_compared() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(GOLDENS)


def wire_bytes(unit: Unit) -> int:
    """Without the gaps and padding that the buffers of so small a model mostly consist of."""
    return sum(slot.leaf.numel * slot.leaf.dtype.itemsize for buffer in unit.buffers for slot in buffer.slots)


@pytest.mark.parametrize("shard", ["zero3", "zero2", "zero1"])
def test_merged_blocks_are_gathered_and_reduced_as_one(shard: str) -> None:
    what = recipe(shard, *[Block("linear")] * 6)
    sizes = {unit.name: wire_bytes(unit) for unit in built(what)[1].units}
    three = replace(what, policy=replace(what.policy, bucket_mb=3.5 * sizes["blocks.0"] / 2**20))
    plan = built(three)[1]
    assert [unit.name for unit in plan.units] == ["root", "blocks.0-2", "blocks.3-5"]
    assert plan.units[1].members == ("blocks.0", "blocks.1", "blocks.2")
    found = counts(program_of(three))
    assert found["all_gather"] == (5 if shard == "zero3" else 3)
    assert found["all_reduce" if shard == "zero1" else "reduce_scatter"] == 3
    slices = [node for node in program_of(three).marked("block") if node.meta["phase"] == "forward"]
    assert len(slices) == 6 and len({node.meta["val"].shape for node in slices[:2]}) == 1


def test_a_large_block_is_gathered_in_parts_each_when_it_is_used() -> None:
    what = recipe("zero2")
    sizes = {unit.name: wire_bytes(unit) for unit in built(what)[1].units}
    cut = replace(what, policy=replace(what.policy, bucket_mb=0.7 * sizes["root"] / 2**20))
    names = [unit.name for unit in built(cut)[1].units]
    assert names[:2] == ["root/0", "blocks.0"] and names[-1] == "root/1"
    order = [node.meta["mark"].unit for node in program_of(cut).marked("gather")]
    assert order[0] == "root/0" and order[-1] == "root/1"


def test_ddp_reduces_in_buckets_the_last_parameters_first() -> None:
    what = recipe("ddp", *[Block("linear")] * 4)
    total = sum(map(wire_bytes, built(what)[1].units))
    packed = replace(what, policy=replace(what.policy, bucket_mb=total / 3 / 2**20))
    program, plan = program_of(packed), built(packed)[1]
    reductions = [node.meta["mark"].unit for node in program.marked("reduce")]
    assert reductions == sorted(reductions) and len(reductions) >= 3
    last = plan.units[-1].buffers[0].slots[-1].name
    assert reductions[0] == plan.units[-1].name and last == list(models.build(what)[0].state_dict())[-1]
    order = list(program.graph.nodes)
    first, other = program.marked("reduce")[:2]
    between = [node for node in order[order.index(first) : order.index(other)] if role_of(node) is None]
    assert between, "the first reduction does not overlap with backward"
