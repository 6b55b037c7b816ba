"""A program with the package's own operators in it trains as the one without, on simulated ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Plan, Policy, Program, ProgramError, compile_sharded
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, role_of
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.passes.check import check
from tests import models
from tests.chosen import chosen
from tests.models import BLOCKS, Block, Recipe
from tests.recipes import built, program_of, trained
from tests.simulate import Rewrite, Simulation

aten = torch.ops.aten
FLATTEN, ADAM = operators.flatten.default, operators.adam_.default
ACCUMULATE, MEASURE = operators.accumulate_.default, operators.measure.default
CLOSE = 1e-6  # relative, by tensor norm: the update's scalars are rounded in another order
WRONG = 1e-4


def run(recipe: Recipe, kernels: bool, kind: str = "step", steps: int = 3, **how: Any) -> Simulation:
    return trained(replace(recipe, policy=replace(recipe.policy, kernels=kernels)), steps, kind=kind, **how)


def furthest(mine: Simulation, other: Simulation) -> float:
    """The largest relative error of a loss or parameter, in float32; a half type's is as many units of its own."""
    assert mine.parameters.keys() == other.parameters.keys() and mine.replicas_agree
    pairs = [*zip(mine.losses, other.losses, strict=True)]
    pairs += [(value, other.parameters[name]) for name, value in mine.parameters.items() if value.numel()]
    units = [min(1.0, torch.finfo(torch.float32).eps / torch.finfo(b.dtype).eps) for _, b in pairs]
    errors = [((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)).item() for a, b in pairs]
    return max(error * unit for error, unit in zip(errors, units, strict=True))


def count(program: Program, target: Any) -> int:
    return sum(node.target is target for node in program.graph.nodes)


def acted(simulation: Simulation, recipe: Recipe) -> None:
    """Each buffer with a gradient and an optimizer is flattened by one call; of AdamW, each group is updated by one.

    All gradients are measured in one, and nothing else reads those, but for a bound on each element.
    """
    program, plan = simulation.program, simulation.plan
    updated = [buffer for buffer in plan.buffers if buffer.updated]
    reached = [
        port
        for port, node in program.inputs.items()
        if port.kind == "shard"
        and plan.buffer(port.name).updated
        and len(node.meta["idle"]) < len(plan.buffer(port.name).slots)
    ]
    assert count(program, FLATTEN) == len(reached)
    adam = recipe.optimizer == "adamw"
    assert count(program, ADAM) == adam * len({buffer.group for buffer in updated})
    calls = [node for node in program.graph.nodes if node.target is ADAM]
    assert all((node.kwargs.get("skipped") is not None) == (plan.policy.scaling is not None) for node in calls)
    assert count(program, MEASURE) + count(program, ACCUMULATE) == bool(reached)
    if plan.policy.clip_value is None:
        gradients = {gradient for node in calls for gradient in node.args[1] if is_reduced(gradient)}
        assert all({user.target for user in gradient.users} <= {ADAM, MEASURE, ACCUMULATE} for gradient in gradients)


def is_reduced(gradient: fx.Node) -> bool:
    """Whether the update sees the gradient as it came from its reduction; else it is one rank's slice of it."""
    return role_of(gradient) in ("wait", "reduce", "cast")


@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # a failing recipe is small enough
    suppress_health_check=list(HealthCheck),
)
@given(recipe=models.recipes())
def test_generated_models_train_the_same(recipe: Recipe) -> None:
    # From step to step AdamW turns the last bit of a near-zero gradient into more.
    without, with_them = (
        run(recipe, kernels, steps=1 if recipe.optimizer == "adamw" else 3) for kernels in (False, True)
    )
    acted(with_them, recipe)
    assert not any(count(without.program, target) for target in (FLATTEN, MEASURE, ADAM))
    collectives = [
        [str(node.target) for node in simulation.program.graph.nodes if is_collective(node)]
        for simulation in (without, with_them)
    ]
    assert collectives[0] == collectives[1]
    error = furthest(with_them, without)
    assert error < CLOSE


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adamw", {"precision": BF16, "clip": 0.05}),
        ("adamw", {"precision": FP16, "loss_scale": "dynamic", "shard": "zero1"}),
        ("adamw", {"precision": FP16, "loss_scale": 2.0**12, "clip": 0.05, "accumulate": "full"}),
        ("sgd", {"precision": FP16, "loss_scale": 2.0**8, "clip_value": 0.01, "shard": "ddp"}),
        ("sgd", {"weigh": "rows", "clip": 0.05}),
    ],
    ids=["bf16, clip", "fp16, loss scale, zero1", "fp16, loss scale, clip", "fp16, clip_value, ddp", "rows, clip"],
)
@pytest.mark.parametrize("microbatches", chosen([1, 2], [2]))
def test_with_mixed_precision_loss_scaling_and_clipping(
    optimizer: str, options: dict[str, Any], microbatches: int
) -> None:
    policy = Policy(**options, bucket_mb=0, lower="eager")
    recipe = Recipe((Block("linear"), Block("transposed")), policy=policy, optimizer=optimizer, groups="two")
    without, with_them = (run(recipe, kernels, microbatches=microbatches) for kernels in (False, True))
    acted(with_them, recipe)
    error = furthest(with_them, without)
    assert error < CLOSE
    for mine, other in zip(with_them.norms, without.norms, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0, equal_nan=True)


def test_the_second_group_s_update_stands_behind_the_factor_that_the_first_one_s_made() -> None:
    """Of two microbatches, clipped: the mean's factor and the clip's are one number for both."""
    policy = Policy(clip=0.5, lower="eager", kernels=True, limit=3, bucket_mb=0.001)
    recipe = Recipe(
        (Block("nested"),) * 2, width=3, hidden=2, policy=policy, optimizer="adamw", groups="two", units="nested"
    )
    without, with_them = (run(recipe, kernels, steps=1, microbatches=2) for kernels in (False, True))
    acted(with_them, recipe)
    assert furthest(with_them, without) < CLOSE


def test_a_step_that_overflows_is_not_taken_and_needs_no_copies() -> None:
    """The first loss scale is too large for fp16; the control's operator is not told."""
    policy = Policy(precision=FP16, loss_scale="dynamic", bucket_mb=0, lower="eager")
    recipe = Recipe((Block("linear"),), policy=policy, optimizer="adamw")

    def untold(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        for node in edit.graph.nodes:
            if node.target is ADAM:
                node.kwargs = {name: value for name, value in node.kwargs.items() if name != "skipped"}
        return edit.done("broken")

    without, with_them = run(recipe, False, steps=1), run(recipe, True, steps=1)
    assert not with_them.norms[0].isfinite() and furthest(with_them, without) == 0
    broken = run(recipe, True, steps=1, damage=untold)
    assert not all(parameter.isfinite().all() for parameter in broken.parameters.values())
    sizes = [
        sum(node.target is aten.clone.default and node.meta["val"].dim() > 0 for node in each.program.graph.nodes)
        for each in (without, with_them)
    ]
    assert sizes[0] > 0 == sizes[1]


def test_gradients_that_are_handed_out_are_those_of_the_loss_itself() -> None:
    policy = Policy(precision=FP16, loss_scale=2.0**8, bucket_mb=0, lower="eager")
    recipe = Recipe((Block("linear"), Block("transposed")), policy=policy)
    without, with_them = (run(recipe, kernels, "gradient", 1) for kernels in (False, True))
    assert count(with_them.program, MEASURE) == 1
    for name, shards in without.gradients.items():
        for mine, other in zip(with_them.gradients[name], shards, strict=True):
            assert torch.equal(mine, other), name


def test_with_microbatches() -> None:
    policy = Policy(accumulate="full", clip=0.05, bucket_mb=0, lower="eager")
    recipe = Recipe((Block("linear"),), policy=policy)
    error = furthest(run(recipe, True, microbatches=2), run(recipe, False, microbatches=2))
    assert error < CLOSE


def test_shards_of_a_microbatch_join_their_sums_in_one_call() -> None:
    policy = Policy(clip=0.05, bucket_mb=0, lower="eager")
    recipe = Recipe((Block("linear"), Block("transposed")), policy=policy, groups="two")
    without, with_them = (run(recipe, kernels, microbatches=3) for kernels in (False, True))
    assert furthest(with_them, without) < CLOSE
    assert furthest(with_them, run(recipe, True, microbatches=1)) > WRONG
    plain, joined = (
        program_of(replace(recipe, policy=replace(policy, kernels=kernels)), "microbatch") for kernels in (False, True)
    )
    buffers = sum(port.kind == "sum" for port in joined.ports if port.side == "in") - 2  # the count and the loss
    assert buffers > 1
    assert (count(plain, ACCUMULATE), count(plain, aten.add_.Tensor)) == (0, buffers + 2)
    assert (count(joined, ACCUMULATE), count(joined, aten.add_.Tensor)) == (1, 2)
    last = with_them.program
    assert (count(last, ACCUMULATE), count(last, MEASURE)) == (1, 0)
    assert count(without.program, aten.zero_.default) == buffers + 2
    assert (count(last, aten.zero_.default), count(last, aten._foreach_zero_.default)) == (0, 2)  # float32, float64
    (call,) = [node for node in last.graph.nodes if node.target is ACCUMULATE]
    assert len(call.args[0]) == buffers and call.args[2] is not None  # divided by three in the norm and the update
    assert {user.target for gradient in call.args[0] for user in gradient.users} <= {ACCUMULATE, aten.div.Tensor}


def test_gradients_are_flattened_bit_for_bit() -> None:
    kinds = ("transposed", "numbers", "read twice", "tied inside")
    assert set(kinds) <= set(BLOCKS)
    recipe = Recipe(tuple(map(Block, kinds)), policy=Policy(bucket_mb=0, lower="eager"))
    without, with_them = (run(recipe, kernels, "gradient", 1) for kernels in (False, True))
    assert without.gradients.keys() == with_them.gradients.keys()
    for name, shards in without.gradients.items():
        for mine, other in zip(with_them.gradients[name], shards, strict=True):
            assert torch.equal(mine, other), name


CLIPPED = Recipe(
    (Block("linear"),),
    width=8,
    hidden=8,
    policy=Policy(clip=0.01, bucket_mb=0, lower="eager"),
    optimizer="adamw",
)


@functools.cache
def plain() -> Simulation:
    return run(CLIPPED, False)


def a_gradient_is_left_out(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    node = next(node for node in edit.graph.nodes if node.target is FLATTEN and len(node.args[0]) > 1)
    node.args = (node.args[0][1:], node.args[1][1:], *node.args[2:])
    return edit.done("broken")


def another_number(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    node = next(node for node in edit.graph.nodes if node.target is ADAM)
    node.kwargs = {**node.kwargs, "beta1": 0.8}
    return edit.done("broken")


def no_clipping(program: Program, plan: Plan) -> Program:
    edit = Edit(program)
    node = next(node for node in edit.graph.nodes if node.target is ADAM)
    node.args = (*node.args[:8], None, *node.args[9:])
    return edit.done("broken")


@pytest.mark.parametrize("damage", [a_gradient_is_left_out, another_number, no_clipping])
def test_the_comparison_notices_a_broken_program(damage: Rewrite) -> None:
    error = furthest(run(CLIPPED, True, damage=damage), plain())
    assert error > WRONG


def test_what_must_hold_of_a_program_must_hold_of_the_fused_one() -> None:
    found, plan = built(replace(CLIPPED, policy=replace(CLIPPED.policy, kernels=True)))
    assert "optimizer_update" in found[-1].history
    edit = Edit(found[-1])
    (call,) = [node for node in edit.graph.nodes if node.target is ADAM]
    edit.graph.erase_node(call)
    with pytest.raises(ProgramError, match=r"the shard of .* is never updated"):
        check(replace(edit.done("broken"), history=found[-1].history), plan)


class _Mine(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (torch.optim.Adam, {}, ("exp_avg", "exp_avg_sq", None)),
        (torch.optim.SGD, {"lr": 0.1}, None),
        (_Mine, {}, None),
        (torch.optim.RMSprop, {}, None),
    ],
)
def test_a_formula_is_known_by_the_class(kind: Any, options: dict[str, Any], expected: Any) -> None:
    (rule,) = make_rules(kind([torch.nn.Parameter(torch.ones(3))], **options))
    assert (rule.formula and rule.formula.lists) == expected


def test_an_optimizer_without_formula_is_traced_and_clipped() -> None:
    torch.manual_seed(0)
    batch, weights = torch.randn(4, 6), []
    for kernels in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        policy = Policy(lower="eager", clip=0.01, kernels=kernels)
        sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=policy)
        for _ in range(3):
            sharded.step(batch)
        weights.append(sharded.full_state_dict()["weight"])
    torch.testing.assert_close(*weights, rtol=1e-6, atol=0)  # the norm's sum is in another order


def test_scheduled_momentum_reaches_the_operator() -> None:
    torch.manual_seed(0)
    batch, weights = torch.randn(4, 6), []
    for kernels in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        policy = Policy(lower="eager", kernels=kernels)
        sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=policy)
        for _ in range(6):
            sharded.step(batch)
            schedule.step()
        weights.append(sharded.full_state_dict()["weight"])
        assert count(sharded.program, ADAM) == kernels
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)


def test_on_a_cpu_they_are_left_out_unless_asked_for() -> None:
    with pytest.raises(ValueError, match='kernels is 1; expected True, False or "auto"'):
        Policy(kernels=1)  # type: ignore[arg-type]
    found, plan = built(Recipe((Block("linear"),), policy=Policy(bucket_mb=0, lower="eager")))
    assert not plan.kernels and not count(found[-1], FLATTEN)
    assert replace(plan, device=torch.device("cuda")).kernels
