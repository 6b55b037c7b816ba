"""A sharded program on several simulated ranks trains as eager PyTorch does on the mean of the ranks' gradients."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx, nn

from fsdp_compiled import Plan, Policy, Program
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, is_random, is_wait, role_of
from fsdp_compiled.ir.program import LOSS, Port
from fsdp_compiled.passes import OPTIONAL
from tests import models
from tests.chosen import chosen, examples
from tests.models import BLOCKS, Block, Recipe
from tests.recipes import built, program_of, trained
from tests.simulate import Batch, Rewrite, Simulation, captured, enlist, noise, passes, ranks, simulate

aten = torch.ops.aten

SHARDS = ("zero3", "zero2", "zero1", "ddp")
MESHES = ((2, 1), (3, 1), (4, 1), (2, 2))  # shard x replicate
CLOSE = 1e-6  # relative, by tensor norm; what sums in another order cost in float32
WRONG = 1e-4  # what a broken program must be off by, at the least


@dataclass
class Eager:
    """What one process holds that knows every rank's batch."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: list[dict[str, torch.Tensor]]


def eager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Any,
    batches: Sequence[Sequence[Batch]],
    clip: float | None,
    shard: int,
    microbatches: int = 1,
) -> Eager:
    """Plain autograd on each rank's batch, with that rank's dropout masks and module buffers; the mean; one update.

    The mean is taken as the collectives take it: over the shard axis, then over the replicas, then over microbatches.
    """
    model, optimizer = copy.deepcopy((model, optimizer))
    world = len(batches[0])
    locals_ = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in range(world)]
    states = [noise(rank) for rank in range(world)]
    owned = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    found = Eager([], [], {}, locals_)

    def differentiate(rank: int, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        for name, buffer in model.named_buffers():
            buffer.copy_(locals_[rank][name])
        optimizer.zero_grad()
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(states[rank])
            value = loss(model, *batch)
            value.backward()
            states[rank] = torch.get_rng_state()
        for name, buffer in model.named_buffers():
            locals_[rank][name].copy_(buffer)
        return value.detach(), [None if p.grad is None else p.grad.clone() for p in owned]

    for first in range(0, len(batches), microbatches):
        losses, means = [], []
        for row in batches[first : first + microbatches]:
            single = [differentiate(rank, batch) for rank, batch in enumerate(row)]
            losses += [value.double() for value, _ in single]
            means.append([_over_ranks([mine[place] for _, mine in single], shard) for place in range(len(owned))])
        found.losses.append(_mean(losses).to(single[0][0].dtype))
        for parameter, *gradients in zip(owned, *means, strict=True):
            parameter.grad = None if gradients[0] is None else _mean(gradients)
        given = [parameter.grad for parameter in owned if parameter.grad is not None]
        norm = torch.stack([gradient.double().square().sum() for gradient in given]).sum().sqrt().float()
        found.norms.append(norm)
        if clip is not None:
            for gradient in given:
                gradient.mul_((clip / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))
        optimizer.step()
    found.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


def _over_ranks(values: Sequence[torch.Tensor | None], shard: int) -> torch.Tensor | None:
    if values[0] is None:
        return None
    return _mean([_mean(values[start : start + shard]) for start in range(0, len(values), shard)])


def _mean(values: Sequence[Any]) -> torch.Tensor:
    return functools.reduce(operator.add, values) / len(values)


def both(recipe: Recipe, steps: int = 3, microbatches: int = 1, **how: Any) -> tuple[Simulation, Eager]:
    """The program on simulated ranks, and the reference, from the same start."""
    model, optimizer = models.build(recipe)
    data = models.batches(recipe, steps * microbatches)
    reference = eager(model, optimizer, models.loss, data, recipe.policy.clip, recipe.shard, microbatches)
    return trained(recipe, steps, microbatches, **how), reference


def furthest(simulation: Simulation, reference: Eager) -> float:
    """The largest relative error of any loss, norm, parameter or buffer."""
    assert simulation.parameters.keys() == reference.parameters.keys()
    if not simulation.replicas_agree:
        return math.inf
    pairs = [
        *zip(simulation.losses, reference.losses, strict=True),
        *zip(simulation.norms, reference.norms, strict=True),
        *((value, reference.parameters[name]) for name, value in simulation.parameters.items()),
    ]
    for mine, theirs in zip(simulation.buffers, reference.buffers, strict=True):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in mine]
    return max(_error(value, expected) for value, expected in pairs)


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
    if value.numel() == 0:
        return 0.0
    scale = torch.finfo(value.dtype).eps / torch.finfo(torch.float32).eps if value.is_floating_point() else 1.0
    value, expected = value.double(), expected.double()
    return ((value - expected).norm() / expected.norm().clamp(min=1e-3)).item() / max(scale, 1.0)


def policy(shard: str, clip: float | None = None) -> Policy:
    return Policy(shard=shard, clip=clip, bucket_mb=0, lower="eager")


def three_blocks(shard: str = "zero3", mesh: tuple[int, int] = (2, 1), **options: Any) -> Recipe:
    """Blocks of one shape: their buffers could be taken for each other."""
    return Recipe((Block("linear"),) * 3, policy=policy(shard), shard=mesh[0], replicate=mesh[1], **options)


KINDS = (
    "attention",
    "dropped",
    "normed",
    "mixed",
    "tied inside",
    "unreached",
)  # others are in test_shape and generated
# Each placement and each mesh, those that reduce over one axis and over two.
SOME = [("zero3", (2, 1)), ("zero3", (2, 2)), ("zero2", (3, 1)), ("zero1", (4, 1)), ("ddp", (2, 2)), ("ddp", (2, 1))]


@pytest.mark.parametrize(("shard", "mesh"), chosen(itertools.product(SHARDS, MESHES), SOME, ids=str))
def test_training_is_bit_for_bit_eager_training_on_the_mean_gradient(shard: str, mesh: tuple[int, int]) -> None:
    recipe = three_blocks(shard, mesh, optimizer="adamw", tied_head=True)
    simulation, reference = both(recipe)
    assert all(map(torch.equal, simulation.losses, reference.losses))
    for name, value in simulation.parameters.items():
        assert torch.equal(value, reference.parameters[name]), name
    error = furthest(simulation, reference)
    assert error < CLOSE  # the norms, whose order of summation is another


@pytest.mark.parametrize("shard", SHARDS)
def test_clipping_scales_by_the_global_norm(shard: str) -> None:
    recipe = replace(three_blocks(shard, (3, 1)), policy=policy(shard, clip=0.05), groups="two")
    simulation, reference = both(recipe)
    assert min(simulation.norms) > 0.05, "nothing was clipped"
    error = furthest(simulation, reference)
    assert error < CLOSE


@pytest.mark.parametrize("kind", chosen(BLOCKS, KINDS))
def test_every_kind_of_block_trains_as_in_eager(kind: str) -> None:
    error = furthest(*both(Recipe((Block(kind), Block("linear")), policy=policy("zero3"), units="pattern"), steps=2))
    assert error < CLOSE


# An example takes more than a second, so shrinking a failure would take minutes; recipes are small as they are.
@settings(
    max_examples=examples(4, 10),
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(models.recipes())
def test_generated_models_train_as_in_eager(recipe: Recipe) -> None:
    simulation, reference = both(recipe, steps=2)
    error = furthest(simulation, reference)
    assert error < CLOSE
    assert not any(free.any() for free in simulation.padding), "padding became something else than zero"


@pytest.mark.parametrize(("shard", "mesh"), [("zero3", (3, 1)), ("zero2", (2, 2)), ("zero1", (2, 1)), ("ddp", (2, 1))])
def test_gradients_are_the_mean_over_the_ranks_in_the_place_of_their_parameters(
    shard: str, mesh: tuple[int, int]
) -> None:
    recipe = three_blocks(shard, mesh)
    simulation = trained(recipe, 1, kind="gradient")
    model, _ = models.build(recipe)
    row = models.batches(recipe, 1)[0]
    single = [torch.autograd.grad(models.loss(model, *batch), list(model.parameters())) for batch in row]
    means = {
        name: _mean(
            [_mean([mine[place] for mine in single[at : at + mesh[0]]]) for at in range(0, len(single), mesh[0])]
        )
        for place, (name, _) in enumerate(model.named_parameters())
    }
    for buffer in simulation.plan.buffers:
        values = simulation.gradients[buffer.key]
        whole = torch.cat(values[: mesh[0]]) if simulation.plan.placement.gradient else values[0]
        for slot in buffer.slots:
            assert torch.equal(whole[slot.offset : slot.end], means[slot.name].reshape(-1)), slot.name


PLACES = [("zero3", (3, 1)), ("zero2", (2, 2)), ("zero1", (2, 1)), ("ddp", (2, 1))]


@pytest.mark.parametrize(
    ("accumulate", "shard", "mesh"),
    chosen(
        [(how, *place) for how in ("shards", "full") for place in PLACES],
        [("shards", *PLACES[0]), ("shards", *PLACES[2]), ("full", *PLACES[1]), ("full", *PLACES[3])],
        ids=str,
    ),
)
def test_microbatches_add_up_to_the_mean_over_all_of_them(shard: str, mesh: tuple[int, int], accumulate: str) -> None:
    recipe = Recipe(
        (Block("dropped"), Block("normed")),
        policy=replace(policy(shard, clip=0.5), accumulate=accumulate),
        shard=mesh[0],
        replicate=mesh[1],
        units="pattern",
    )
    error = furthest(*both(recipe, steps=2, microbatches=2))
    assert error < CLOSE


def test_a_parameter_that_the_loss_never_reaches_stays_as_it_is_under_weight_decay() -> None:
    recipe = Recipe((Block("unreached"),), policy=policy("zero3"))
    model, _ = models.build(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    data = models.batches(recipe, 2)
    simulation = simulate(model, optimizer, models.loss, data, recipe.policy)
    error = furthest(simulation, eager(model, optimizer, models.loss, data, None, 2))
    assert error < CLOSE


class OnlyEmpty(nn.Module):
    """Its blocks own nothing but empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Empty() for _ in range(2))
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, *(block(x) for block in self.blocks)], 1))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Number(nn.Module):
    """Its loss may be a parameter itself, so that backward has nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + x.sum()


@pytest.mark.parametrize("kind", [OnlyEmpty, Number])
@pytest.mark.parametrize("shard", ["zero3", "ddp"])
def test_degenerate_models_train_as_in_eager(kind: type[nn.Module], shard: str) -> None:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [[(torch.randn(2, 3),) for _ in range(2)] for _ in range(2)]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = model(x)
        return value.square().mean() if value.dim() else value

    simulation = simulate(model, optimizer, loss, data, policy(shard))
    error = furthest(simulation, eager(model, optimizer, loss, data, None, 2))
    assert error < CLOSE


# Controls: what the comparisons above must notice.


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


def one_unreduced(program: Program, plan: Plan) -> Program:
    """The last reduction hands each rank a part of its own gradient."""

    def own(edit: Edit, wait: fx.Node) -> fx.Node:
        flat = wait.args[0].args[0]  # type: ignore[union-attr]
        part = edit.call(aten.slice.Tensor, flat, 0, 0, wait.meta["val"].numel())
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
            return edit.call(aten.add.Tensor, wait.args[0].args[0], edit.call(aten.mul.Tensor, wait, 0.0))  # type: ignore[union-attr]

        waits = [node for node in program.marked("norm") if is_wait(node)]
        return replaced(program, waits, own)

    with pytest.raises(RuntimeError, match="the ranks run different programs"):
        both(three_blocks(), damage=damage)


# A program is a value.

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
