"""What `tests/passes/test_meaning.py` compares would notice a broken program: each control breaks one thing."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from fsdp_compiled import Plan, Program
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, is_random, is_wait, role_of
from fsdp_compiled.ir.program import LOSS
from tests.beside_eager import CLOSE, SHARDS, WRONG, both, furthest, policy, three_blocks
from tests.chosen import chosen
from tests.models import Block, Recipe
from tests.simulate import Rewrite

aten = torch.ops.aten


def replaced(program: Program, nodes: Sequence[fx.Node], make: Callable[[Edit, fx.Node], fx.Node]) -> Program:
    """The program with another node, made just after each of these, in the place of each."""
    edit = Edit(program)
    for old in (edit.map[node] for node in nodes):
        users = list(old.users)
        with edit.at(old.next, old.meta["phase"]):
            new = make(edit, old)
        for user in users:
            user.replace_input_with(old, new)
        for port, value in edit.outputs.items():
            if value is old:
                edit.set_output(port, new)
    return edit.done("damage")


def sent(edit: Edit, wait: fx.Node) -> fx.Node:
    """What this rank gave to the collective that is waited for, which may write over it."""
    collective: fx.Node = wait.args[0]  # type: ignore[assignment]
    with edit.at(collective, collective.meta["phase"]):
        return edit.call(aten.clone.default, collective.args[0])


def one_unreduced(program: Program, plan: Plan) -> Program:
    """The last reduction hands each rank a part of its own gradient."""

    def own(edit: Edit, wait: fx.Node) -> fx.Node:
        part = edit.call(aten.slice.Tensor, sent(edit, wait), 0, 0, wait.meta["val"].numel())
        return edit.call(aten.add.Tensor, part, edit.call(aten.mul.Tensor, wait, 0.0))

    waits = [node for node in program.marked("wait") if role_of(node.args[0]) == "reduce"]  # type: ignore[arg-type]
    return replaced(program, waits[-1:], own)


def shifted(program: Program, plan: Plan) -> Program:
    """One buffer's gradients arrive one element late."""
    flat = [node.args[0] for node in program.marked("reduce")][-1:]
    return replaced(program, flat, lambda edit, node: edit.call(aten.roll.default, node, [1]))  # type: ignore[arg-type]


def crossed(program: Program, plan: Plan) -> Program:
    """One block reads what was gathered for another."""
    waits = [node for node in program.marked("wait") if role_of(node.args[0]) in ("gather", "part")]  # type: ignore[arg-type]
    blocks = [node for node in waits if node.meta["mark"].unit.startswith("blocks")]
    edit = Edit(program)
    first, second = edit.map[blocks[0]], edit.map[blocks[1]]
    users = list(second.users)
    with edit.at(second.next, "forward"):
        other = edit.call(aten.add.Tensor, first, edit.call(aten.mul.Tensor, second, 0.0))
    for user in users:
        user.replace_input_with(second, other)
    return edit.done("damage")


def doubled_loss(program: Program, plan: Plan) -> Program:
    """The loss that leaves is doubled."""
    edit = Edit(program)
    loss = edit.outputs[LOSS]
    with edit.at(edit.end, "update"):
        edit.set_output(LOSS, edit.call(aten.mul.Tensor, loss, 2.0, mark=Mark("norm")))
    return edit.done("damage")


def wrong_mean(program: Program, plan: Plan) -> Program:
    """The replicas of one buffer are summed, not averaged."""
    waits = [node for node in program.marked("wait") if node.args[0].args[-1] == "replicate"]  # type: ignore[union-attr]
    return replaced(program, waits[-1:], lambda edit, node: edit.call(aten.mul.Tensor, node, 2.0))


def redrawn(program: Program, plan: Plan) -> Program:
    """Backward draws a dropout mask of its own."""
    edit = Edit(program)
    node = next(edit.map[node] for node in program.graph.nodes if is_random(node))
    late = [user for getitem in node.users for user in getitem.users if user.meta.get("phase") == "backward"]
    for user in late:
        used = next(getitem for getitem in node.users if getitem in user.all_input_nodes)
        with edit.at(user, "backward"):
            again = edit.clone(node, {})
            user.replace_input_with(used, edit.call(operator.getitem, again, used.args[1]))
    return edit.done("damage")


def unstored(program: Program, plan: Plan) -> Program:
    """BatchNorm's statistics are written back unchanged."""
    stores = [
        node
        for node in program.graph.nodes
        if node.target is aten.copy_.default and node.args[0] in set(_inputs(program, "buffer"))
    ]
    values = [node.args[1] for node in stores]
    targets = [edit_target.args[0] for edit_target in stores]
    edit = Edit(program)
    for store, value, target in zip(stores, values, targets, strict=True):
        edit.map[store].replace_input_with(edit.map[value], edit.map[target])  # type: ignore[index]
    return edit.done("damage")


def uncleared(program: Program, plan: Plan) -> Program:
    """The first microbatch of a step adds to what the step before left."""
    edit = Edit(program)
    for node in program.graph.nodes:
        if node.target is aten.zero_.default:
            edit.graph.erase_node(edit.map[node])
    return edit.done("damage")


def test_sums_that_are_not_cleared_are_noticed() -> None:
    error = furthest(*both(three_blocks(), microbatches=2, damage=uncleared))
    assert error > WRONG


def _inputs(program: Program, kind: str) -> list[fx.Node]:
    return [node for port, node in program.inputs.items() if port.kind == kind]


CONTROLS: list[tuple[Rewrite, Recipe]] = [
    *((one_unreduced, three_blocks(shard)) for shard in SHARDS),
    (one_unreduced, three_blocks("zero3", (2, 2))),
    (shifted, three_blocks("zero3", (3, 1))),
    (shifted, three_blocks("ddp")),
    (crossed, three_blocks("zero3")),
    (doubled_loss, three_blocks("zero2")),
    (wrong_mean, three_blocks("zero2", (2, 2))),
    (redrawn, Recipe((Block("dropped", checkpoint=True),) * 2, policy=policy("zero3"))),
    (unstored, Recipe((Block("normed"),), policy=policy("zero1"))),
]


@pytest.mark.parametrize(
    ("damage", "recipe"),
    chosen(CONTROLS, [CONTROLS[0], *CONTROLS[4:6], *CONTROLS[7:]]),
    ids=lambda value: getattr(value, "__name__", getattr(value, "policy", value) and ""),
)
def test_the_comparison_notices_a_broken_program(damage: Rewrite, recipe: Recipe) -> None:
    simulation, reference = both(recipe, damage=damage)
    assert simulation.stages[-1].text() != simulation.stages[-2].text(), "nothing was broken"
    error = furthest(simulation, reference)
    assert error > WRONG
    assert _undamaged(recipe) < CLOSE


@functools.cache
def _undamaged(recipe: Recipe) -> float:
    return furthest(*both(recipe, steps=2))


def test_a_program_whose_last_reduction_is_missing_stops_by_itself() -> None:
    def damage(program: Program, plan: Plan) -> Program:
        def own(edit: Edit, wait: fx.Node) -> fx.Node:
            return edit.call(aten.add.Tensor, sent(edit, wait), edit.call(aten.mul.Tensor, wait, 0.0))

        waits = [node for node in program.marked("norm") if is_wait(node)]
        return replaced(program, waits, own)

    with pytest.raises(RuntimeError, match="the ranks run different programs"):
        both(three_blocks(), damage=damage)
