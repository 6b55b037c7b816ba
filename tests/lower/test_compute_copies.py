"""Shards that are kept in the compute dtype as well: the same numbers without a cast, whoever writes the shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from fsdp_compiled import Plan, Policy, Program, ProgramError, Sharded, compile_sharded
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, role_of
from fsdp_compiled.ir.program import Port
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.passes.check import check
from fsdp_compiled.runtime.state import Copies
from tests import models
from tests.chosen import chosen, examples
from tests.models import Block, Recipe
from tests.parts import parts
from tests.recipes import built, program_of, trained
from tests.simulate import Simulation

aten = torch.ops.aten
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)
EAGER = Policy(bucket_mb=0, lower="eager")


def casts(program: Program) -> Counter[str]:
    """How often each shard is cast before it is gathered."""
    shards = [(port.name, node) for port, node in program.inputs.items() if port.kind == "shard"]
    return Counter(name for name, node in shards for user in node.users if role_of(user) == "cast")


def copies_of(program: Program) -> int:
    return sum(port.kind == "copy" for port in program.ports)


def compared(recipe: Recipe, microbatches: int = 1) -> tuple[Simulation, Simulation]:
    """Runs without and with copies, after three equal steps, bit for bit."""
    plain, kept = (
        trained(replace(recipe, policy=replace(recipe.policy, copies=copies)), 3, microbatches)
        for copies in (False, True)
    )
    for left, right in zip([*plain.losses, *plain.norms], [*kept.losses, *kept.norms], strict=True):
        assert torch.equal(left.nan_to_num(nan=7e7), right.nan_to_num(nan=7e7))
    for name, value in plain.parameters.items():
        assert torch.equal(value, kept.parameters[name]), name
    for rank in kept.ranks:
        for name, copy in rank.named("copy").items():
            assert torch.equal(copy, rank.values[Port("in", "shard", name)].to(copy.dtype)), name
    assert copies_of(plain.program) == 0 < copies_of(kept.program)
    assert not any(kept.plan.buffer(name).updated for name in casts(kept.program))
    return plain, kept


HALVES = ((BF16, None), (FP16, "dynamic"))
PAIRS = [  # each placement with both precisions and both ways of updating, which meet in every way as well
    (kernels, shard, *HALVES[half])
    for place, shard in enumerate(("zero3", "zero2", "zero1", "ddp"))
    for kernels, half in ((False, place % 2), (True, 1 - place % 2))
]


@pytest.mark.parametrize(
    ("kernels", "shard", "precision", "scale"), chosen(PAIRS, [PAIRS[place] for place in (0, 3, 4, 7)])
)
def test_placements_train_bit_for_bit_without_casting_a_shard(
    kernels: bool, shard: str, precision: MixedPrecisionPolicy, scale: str | None
) -> None:
    policy = replace(EAGER, kernels=kernels, shard=shard, precision=precision, loss_scale=scale, clip=0.05)
    recipe = Recipe((Block("linear"), Block("unreached")), policy=policy, optimizer="adamw", groups="two")
    plain, kept = (simulation.program for simulation in compared(recipe, microbatches=2))
    assert casts(plain).total() >= copies_of(kept) > 1 and not casts(kept)
    assert ("compute_copies" in kept.history, "compute_copies" in plain.history) == (True, False)
    sent = [[str(node.target) for node in one.graph.nodes if is_collective(node)] for one in (plain, kept)]
    assert sent[0] == sent[1]
    gathered = [node for node in kept.marked("gather") if node.meta["phase"] in ("forward", "backward")]
    assert bool(gathered) == (shard != "ddp")
    assert all(source.op == "placeholder" for node in gathered for source in node.all_input_nodes)


@settings(
    max_examples=examples(2, 3),
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(recipe=models.recipes(), kernels=st.booleans())
def test_generated_models_train_bit_for_bit(recipe: Recipe, kernels: bool) -> None:
    policy = replace(recipe.policy, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16), kernels=kernels)
    compared(replace(recipe, policy=policy))


def test_a_group_with_and_without_copies_is_two_calls_and_one_step() -> None:
    """Parameters that are in the compute dtype to begin with have none."""
    plain, kept = (make(copies, kernels=True, second=torch.bfloat16) for copies in (False, True))
    for _ in range(3):
        assert torch.equal(plain.step(BATCH), kept.step(BATCH))
    nodes = list(kept.program.graph.nodes)
    calls = [node for node in nodes if node.target is operators.adam_.default]
    assert [len(node.args[5]) for node in calls] == [0, 1]
    counts = [node for port, node in kept.program.inputs.items() if port.kind == "state" and port.part == "step"]
    assert [sum(user.target is aten.add_.Tensor for user in node.users) for node in counts] == [1]


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_copy_is_of_the_shard_as_it_was_rounded(lower: str) -> None:
    """Parameters in fp16 that compute in bfloat16 are rounded twice."""
    with parts() as of:
        plain, kept = (make(copies, kernels=True, lower=lower, second=torch.float16) for copies in (False, True))
    for _ in range(4):
        assert torch.equal(plain.step(BATCH), kept.step(BATCH))
        for name, copy in of(kept).copies.tensors.items():
            assert torch.equal(copy, kept.state.parameters[name].bfloat16()), name


def test_only_what_trains_reads_copies_and_what_accumulates_does_not_write_them() -> None:
    recipe = Recipe((Block("linear"),), policy=replace(EAGER, precision=BF16, copies=True))
    assert not copies_of(program_of(recipe, "gradient")) and not copies_of(program_of(recipe, "forward"))
    adding = program_of(recipe, "microbatch")
    read = [node for port, node in adding.inputs.items() if port.kind == "copy"]
    assert read and not casts(adding) and all(is_collective(user) for node in read for user in node.users)


def test_a_copy_that_no_update_writes_is_refused() -> None:
    found, plan = built(Recipe((Block("linear"),), policy=replace(EAGER, precision=BF16, copies=True)))
    edit = Edit(found[-1])
    (write, *_) = (
        user
        for port, node in edit.inputs.items()
        if port.kind == "copy"
        for user in node.users
        if user.target is aten.copy_.default
    )
    edit.graph.erase_node(write)
    with pytest.raises(ProgramError, match=r"the copy of .* is never updated"):
        check(replace(edit.done("broken"), history=found[-1].history), plan)


def test_the_comparison_notices_copies_of_the_values_before_the_update() -> None:
    """The control: the update's call writes no copies."""

    def stale(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        for node in edit.graph.nodes:
            if node.target is operators.adam_.default:
                node.args = (*node.args[:5], [], *node.args[6:])
        return edit.done("broken")

    policy = replace(EAGER, kernels=True, copies=True, precision=BF16)
    recipe = Recipe((Block("linear"),), policy=policy, optimizer="adamw")
    right, wrong = trained(recipe, 3), trained(recipe, 3, damage=stale)
    assert torch.equal(right.losses[0], wrong.losses[0]) and not torch.equal(right.losses[1], wrong.losses[1])


# On one real rank, where a person writes the shards.

BATCH = torch.linspace(-1, 1, 24).view(4, 6)


def make(copies: bool, second: torch.dtype = torch.float32, **how: Any) -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, dtype=second))
    policy = replace(EAGER, precision=BF16, copies=copies, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return compile_sharded(model, optimizer, loss=lambda model, x: model(x).float().square().mean(), policy=policy)


def in_place(sharded: Sharded) -> None:
    for shard in sharded.state.parameters.values():
        shard.mul_(0.5)


def under_inference_mode(sharded: Sharded) -> None:
    with torch.inference_mode():
        in_place(sharded)


def by_another_tensor(sharded: Sharded) -> None:
    parameters = sharded.state.parameters
    parameters.update({name: shard * 0.5 for name, shard in parameters.items()})


def by_hand(sharded: Sharded) -> None:
    for shard in sharded.state.parameters.values():
        shard.data.mul_(0.5)
        torch.autograd.graph.increment_version(shard)


WRITES = (in_place, under_inference_mode, by_another_tensor, by_hand)


@pytest.fixture(scope="module")
def pairs() -> Callable[[str, bool], tuple[Sharded, ...]]:
    """Without copies and with them, which all writes are done to, one after another."""
    return cache(lambda lower, kernels: tuple(make(copies, lower=lower, kernels=kernels) for copies in (False, True)))


@pytest.mark.parametrize(
    ("write", "lower", "kernels"),
    chosen(
        [
            *((write, "eager", kernels) for write in WRITES for kernels in (False, True)),
            (in_place, "inductor", False),
            (by_another_tensor, "inductor", True),
        ],
        [(write, "eager", True) for write in WRITES],
    ),
)
def test_a_shard_that_a_person_writes_is_followed(
    write: Callable[[Sharded], None], lower: str, kernels: bool, pairs: Callable[[str, bool], tuple[Sharded, ...]]
) -> None:
    plain, kept = pairs(lower, kernels)
    for _ in range(2):
        for call in ("step", "accumulate", "step", "value_and_grad", "step"):
            left, right = (getattr(sharded, call)(BATCH) for sharded in (plain, kept))
            assert all(map(torch.equal, pytree.tree_leaves(left), pytree.tree_leaves(right))), call
            write(plain)
            write(kept)
    assert torch.equal(plain(BATCH), kept(BATCH))


def test_between_steps_nothing_is_cast_and_a_hidden_write_lasts_one_step() -> None:
    """What the copy holds is what the step uses: were it made anew each step, rubbish in it would not show."""
    with parts() as of:
        plain, kept = make(False), make(True)
    for sharded in (plain, kept):
        sharded.step(BATCH)
    for copy in of(kept).copies.tensors.values():
        copy.data.fill_(3.0)
    assert not torch.equal(plain.step(BATCH), kept.step(BATCH))
    for name, copy in of(kept).copies.tensors.items():
        assert torch.equal(copy, kept.state.parameters[name].bfloat16()), name


def test_states_that_take_turns_have_one_set_of_copies() -> None:
    with parts() as of:
        plain, kept = make(False), make(True)
    states = [[pytree.tree_map(torch.clone, sharded.state) for _ in range(2)] for sharded in (plain, kept)]
    with torch.no_grad():
        for one in states:
            for shard in one[1].parameters.values():
                shard.add_(0.25)
    places = [copy.data_ptr() for copy in of(kept).copies.tensors.values()]
    for _ in range(3):
        for which in range(2):
            states[0][which], left = plain.apply(states[0][which], BATCH)
            states[1][which], right = kept.apply(states[1][which], BATCH)
            assert torch.equal(left, right)
    assert [copy.data_ptr() for copy in of(kept).copies.tensors.values()] == places


def test_after_a_step_that_failed_copies_are_made_anew() -> None:
    with parts() as of:
        sharded = make(True)
    sharded.step(BATCH)
    copies = of(sharded).copies
    copies.follow(sharded.state.parameters)
    for copy in copies.tensors.values():
        copy.fill_(9.0)  # the step that follows does not come to its end
    copies.follow(sharded.state.parameters)
    assert all(torch.equal(copy, sharded.state.parameters[name].bfloat16()) for name, copy in copies.tensors.items())


def test_where_they_are_kept_and_what_they_cost() -> None:
    with parts() as of:
        sharded, plain = make(True), make(False)
    assert "shards in the compute dtype, for gathers without a cast (copies): " in str(sharded.plan)
    sharded.step(BATCH)
    copies = of(sharded).copies.tensors
    assert sharded.memory.persistent.copies == sum(copy.nbytes for copy in copies.values()) == sharded.plan.copy_bytes
    assert "copies" in str(sharded.memory.persistent)
    assert not of(plain).copies.tensors and "copies" not in str(plain.plan)
    auto = replace(sharded.plan, policy=replace(EAGER, precision=BF16))
    assert not auto.copy_bytes and replace(auto, device=torch.device("cuda")).copy_bytes
    assert not replace(auto, policy=replace(EAGER, precision=BF16, kernels=True, offload=True)).copy_bytes
    assert not Copies(replace(sharded.plan, policy=replace(EAGER, copies=True))).tensors  # nothing is cast


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r'Policy\.copies is 1; expected True, False or "auto"'):
        Policy(copies=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Policy\.offload keeps shards in host memory, and Policy\.copies=True"):
        Policy(copies=True, offload=True)
