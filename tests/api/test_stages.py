"""A program goes from pass to pass without copies, and what each pass made is made again for who looks at it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, ProgramError, Sharded, compile_sharded, passes
from fsdp_compiled.ir import edit
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.node_copies import Kept
from fsdp_compiled.ir.program import LOSS, Program
from fsdp_compiled.passes import Pass
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.programs import program_maker
from fsdp_compiled.runtime.programs.compile import Compiled, transform
from tests import models, simulate
from tests.models import Block, Recipe
from tests.parts import parts

aten = torch.ops.aten
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
RECIPES = [
    Recipe((Block("nested"), Block("dropped", checkpoint=True)), tied_head=True, optimizer="adamw"),
    Recipe((Block("normed"), Block("unreached")), policy=Policy(lower="eager", limit=2, clip=0.5), groups="two"),
    Recipe((Block("linear"), Block("linear")), policy=Policy(lower="eager", offload=True, weigh="rows", prefetch=2)),
    Recipe(
        (Block("tied inside", freeze="all"), Block("unreached"), Block("read twice")),
        width=7,
        hidden=2,
        units="pattern",
        groups="some",
        shard=3,
        policy=Policy(precision=HALF, lower="eager", limit=2, prefetch=1, bucket_mb=0.001),
    ),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=["checkpointed", "limited", "offloaded", "several buffers"])
@pytest.mark.parametrize("kind", ["step", "last microbatch"])
def test_what_takes_graphs_over_makes_what_copies_them(recipe: Recipe, kind: str) -> None:
    """Name for name; and the program that it is given stays."""
    model, optimizer = models.build(recipe)
    with simulate.ranks(recipe.shard) as places:
        rank = simulate.enlist(model, optimizer, recipe.policy, places[0], models.units(recipe))
        captured = simulate.captured(rank, models.loss, models.batches(recipe, 1)[0][0], kind)
        text, stages = captured.text(), []
        transforms = simulate.passes(rank, kind)
        taken = passes.run(captured, rank.plan, transforms)
        assert captured.text() == text
        copied = passes.run(captured, rank.plan, transforms, stages.append)
    assert taken.text() == copied.text() != text
    assert (taken.ports, taken.history, taken.notes) == (copied.ports, copied.history, copied.notes)
    # Nobody's graph was taken: of each pass that had something to do there is one.
    assert len({one.graph for one in stages}) > 5


def test_an_edit_takes_what_is_donated_alone() -> None:
    recipe = RECIPES[0]
    model, optimizer = models.build(recipe)
    program = simulate.stages(model, optimizer, models.loss, models.batches(recipe, 1)[0][0], recipe.policy)[0][-1]
    assert Edit(program).graph is not program.graph
    assert Edit(program.after("nothing")).graph is not program.graph
    assert Edit(replace(program, donated=True)).graph is program.graph
    assert not replace(program, donated=True).after("nothing").donated


def test_what_passes_are_done_with_is_nobodys_to_take() -> None:
    """Not even where a pass hands on the very program that it was given."""
    recipe = RECIPES[0]
    model, optimizer = models.build(recipe)
    stages, plan = simulate.stages(model, optimizer, models.loss, models.batches(recipe, 1)[0][0], recipe.policy)

    def edits(program: Program, plan: Plan) -> Program:
        return Edit(program).done("edits")

    def hands_on(program: Program, plan: Plan) -> Program:
        given.append(program.donated)
        return replace(program, history=(*program.history, "hands on"))

    given: list[bool] = []
    made = passes.run(stages[-1], plan, (hands_on, edits, hands_on))
    assert given == [False, True] and not made.donated and made.graph is not stages[-1].graph


def trained(**policy: Any) -> tuple[Sharded, Compiled]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    with parts() as of:
        sharded = compile_sharded(
            model, torch.optim.AdamW(model.parameters()), loss=lambda model, x: model(x).square().mean(),
            policy=Policy(lower="eager", clip=1.0, **policy),
        )  # fmt: skip
    sharded.step(torch.ones(2, 4))
    return sharded, of(sharded).programs.newest


@pytest.mark.parametrize("policy", [{}, {"memory_gb": 1e-9}], ids=["as chosen", "fitted to memory"])
def test_stages_are_there_for_who_looks(policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    monkeypatch.setattr(
        program_maker, "transform", lambda one, job: captured.append(one.program.text()) or transform(one, job)
    )
    sharded, compiled = trained(**policy)
    stages = compiled.stages
    assert stages[-1] is compiled.program is sharded.program
    assert [one.history[-1] for one in stages] == list(compiled.program.history)
    assert len({one.text() for one in stages}) > 5 and stages[0].text() == captured[0]
    assert len(compiled.capture.program.graph.nodes) == 0  # nobody takes what passes have changed for the captured one
    with torch.autocast("cpu", torch.bfloat16):  # the caller's modes are not the program's
        assert [one.text() for one in compiled.stages] == [one.text() for one in stages]


@pytest.mark.parametrize("recipe", RECIPES, ids=["checkpointed", "limited", "offloaded", "several buffers"])
def test_a_program_that_is_kept_is_what_it_was(recipe: Recipe) -> None:
    """Its nodes, all that is noted of them, which no pass changes, and the names that nodes have which are inserted."""
    model, optimizer = models.build(recipe)
    with simulate.ranks(recipe.shard) as places:
        rank = simulate.enlist(model, optimizer, recipe.policy, places[0], models.units(recipe))
        captured = simulate.captured(rank, models.loss, models.batches(recipe, 1)[0][0])
        kept = Kept(captured)
        before = captured.text(), [(node.name, dict(node.meta)) for node in captured.graph.nodes]
        transforms = simulate.passes(rank)
        made = passes.run(replace(captured, donated=True), rank.plan, transforms)
        again = kept.program()
        assert made.graph is captured.graph is not again.graph
        assert made.text() != before[0]  # control: the passes changed it
        assert (again.text(), [(node.name, dict(node.meta)) for node in again.graph.nodes]) == before
        assert passes.run(again, rank.plan, transforms).text() == made.text()


def early(program: Program, plan: Plan) -> Program:
    """A value is read before it is there."""
    change = Edit(program)
    first = next(node for node in change.graph.nodes if node.op == "call_function" and node.users)
    change.move([first], before=change.end)
    return change.done("early")


def unreduced(program: Program, plan: Plan) -> Program:
    """A gradient of another size, which the update hides: it reads as many of its elements as there are."""
    change = Edit(program)
    port = next(port for port in change.outputs if port.kind == "gradient")
    with change.at(change.end, "backward"):
        gradient = change.outputs[port]
        twice = change.call(aten.cat.default, [gradient, gradient], mark=gradient.meta["mark"])  # type: ignore[union-attr]
        change.set_output(port, twice)
    return change.done("unreduced")


@pytest.mark.parametrize(("broken", "where"), [(early, "CLOSING"), (unreduced, "REPORTING")])
def test_the_pass_at_fault_is_told(broken: Pass, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nodes are looked at after the last of the passes alone, and a gradient is none of its outputs."""
    monkeypatch.setattr(passes, where, (broken, *getattr(passes, where)))
    with pytest.raises(ProgramError, match=f"^after {broken.__name__}: ") as raised:
        trained()
    assert raised.value.__suppress_context__
    recipe = RECIPES[0]
    model, optimizer = models.build(recipe)
    with simulate.ranks(recipe.shard) as places:  # of a program that is not given away, too
        rank = simulate.enlist(model, optimizer, recipe.policy, places[0])
        captured = simulate.captured(rank, models.loss, models.batches(recipe, 1)[0][0])
        with pytest.raises(ProgramError, match=f"^after {broken.__name__}: "):
            passes.run(captured, rank.plan, simulate.passes(rank))


def test_a_program_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    copied = edit.copied

    def counted(*given: Any) -> Any:
        made.append(1)
        return copied(*given)

    monkeypatch.setattr(edit, "copied", counted)
    _, compiled = trained()
    assert not made
    graphs = {one.graph for one in compiled.stages[:-1]}  # the last pass edits nothing; the last stage is what runs
    assert len(made) == len(graphs) - 1 > 1  # control: who looks at them has one of each


def test_a_pass_that_makes_another_program_the_second_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def impure(program: Program, plan: Plan) -> Program:
        calls.append(1)
        change = Edit(program)
        with change.at(change.end, "update"):
            loss = change.outputs[LOSS]
            change.set_output(LOSS, change.call(aten.mul.Tensor, loss, float(len(calls)), mark=loss.meta["mark"]))  # type: ignore[union-attr]
        return change.done("impure")

    monkeypatch.setattr(passes, "CLOSING", (impure, *passes.CLOSING))
    compiled = trained()[1]
    with pytest.raises(RuntimeError, match="not pure"):
        compiled.stages  # noqa: B018
