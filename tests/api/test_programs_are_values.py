"""A program is a value: no pass changes the one it is given, and one built twice is the same, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from fsdp_compiled import Plan, Program
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.program import Port
from fsdp_compiled.passes import OPTIONAL
from tests import models
from tests.beside_eager import policy, three_blocks
from tests.models import Block, Recipe
from tests.recipes import built, program_of
from tests.simulate import captured, enlist, passes, ranks

PURE = [
    three_blocks("zero3", tied_head=True),
    Recipe((Block("normed"), Block("dropped", checkpoint=True), Block("mixed")), policy=policy("zero3", 0.5)),
    Recipe((Block("unreached"), Block("nested")), policy=policy("zero1"), units="nested", groups="two"),
]


def first_impure(recipe: Recipe, extra: Sequence[Callable[[Program, Plan], Program]] = ()) -> str | None:
    """The first pass that changes the program or plan it is given, if one does."""
    model, optimizer = models.build(recipe)
    with ranks(recipe.shard) as places:
        rank = enlist(model, optimizer, recipe.policy, places[0], models.units(recipe))
        program = captured(rank, models.loss, models.batches(recipe, 1)[0][0])
        for transform in (*passes(rank), *extra):
            if not OPTIONAL.get(transform, lambda plan: True)(rank.plan):
                continue
            text, ports, plan = program.text(), program.ports, str(rank.plan)
            after = transform(program, rank.plan)
            if (program.text(), program.ports, str(rank.plan)) != (text, ports, plan):
                return transform.__name__
            assert after is not program  # a pass with nothing to do may share its graph
            assert after.history == (*program.history, transform.__name__)
            program = after
    return None


@pytest.mark.parametrize("recipe", PURE, ids=["ties", "mixed", "nested"])
def test_no_pass_changes_the_program_it_is_given(recipe: Recipe) -> None:
    assert first_impure(recipe) is None


def test_a_pass_that_changes_its_program_is_noticed() -> None:
    def impure(program: Program, plan: Plan) -> Program:
        node = program.marked("update")[-1]
        node.graph.erase_node(node)
        return Edit(program).done("impure")

    assert first_impure(PURE[0], [impure]) == "impure"


@pytest.mark.parametrize("recipe", PURE[1:2], ids=["mixed"])
def test_a_program_built_twice_has_one_hash_and_names_no_rank(recipe: Recipe) -> None:
    first, again = built(recipe), built(recipe, place=recipe.shard - 1)
    assert [program.text() for program in first[0]] == [program.text() for program in again[0]]
    assert [program.hash for program in first[0]] == [program.hash for program in again[0]]
    assert first[1] == again[1]


def test_programs_that_differ_have_different_hashes() -> None:
    found = [program_of(three_blocks(shard)).hash for shard in ("zero3", "zero2")]
    assert found[0] != found[1]
    assert Port("in", "batch", "[0]") in program_of(three_blocks()).inputs
