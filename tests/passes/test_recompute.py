"""Blocks computed again in backward (``Policy.recompute``): what is kept, what is sent, and the same numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, Program, compile_sharded
from fsdp_compiled.ir.nodes import gathered, is_random, is_view
from fsdp_compiled.ir.program import LOSS
from fsdp_compiled.passes import run
from tests import models
from tests.chosen import chosen
from tests.models import Block, Recipe
from tests.recipes import built, program_of, recipe
from tests.simulate import captured, enlist, lockstep, passes, ranks, stages
from tests.toys import squares


def crossing(program: Program) -> list[fx.Node]:
    """Forward nodes whose values backward reads; gathered parameters and new statistics, which are held anyway, not."""
    held = {node for nodes in gathered(program.graph).values() for node in nodes}
    return [
        node
        for node in program.graph.nodes
        if node.op == "call_function"
        and node.meta["phase"] == "forward"
        and node not in held
        and not any(user.op == "call_function" and user.meta["phase"] == "update" for user in node.users)
        and any(user.op == "call_function" and user.meta["phase"] == "backward" for user in node.users)
    ]


def kept_bytes(program: Program) -> int:
    """What backward keeps of forward, each storage once."""
    sizes = {}
    for node in crossing(program):
        while is_view(node):
            node = node.all_input_nodes[0]
        if node.op == "call_function":
            sizes[node] = sum(value.nbytes for value in pytree.tree_leaves(node.meta["val"]))
    return sum(sizes.values())


def again(shard: str, *blocks: Block, **options: object) -> tuple[Program, Program]:
    """The program that keeps what blocks compute, and the one that computes it again."""
    what = recipe(shard, *blocks, units="pattern", **options)
    return program_of(what), program_of(replace(what, policy=replace(what.policy, recompute="unit")))


@pytest.mark.parametrize(
    ("shard", "block"), [("zero3", "linear"), ("ddp", "linear"), ("zero2", "attention"), ("zero3", "normed")]
)
def test_of_a_block_that_is_computed_again_only_its_input_is_kept(shard: str, block: str) -> None:
    plain, rebuilt = again(shard, *[Block(block)] * 3)
    inside = [node for node in crossing(rebuilt) if node.meta["path"].startswith("blocks.")]
    assert not inside, inside
    assert [node for node in crossing(plain) if node.meta["path"].startswith("blocks.")], "nothing was kept before"
    assert kept_bytes(rebuilt) < kept_bytes(plain)
    # The residual stream before each block, and what the head and the loss keep, as without.
    outside = [node for node in crossing(plain) if not node.meta["path"].startswith("blocks.")]
    assert {node.name for node in crossing(rebuilt)} <= {node.name for node in outside} | {"embedding", "add", "add_1"}


def test_what_is_kept_grows_with_the_blocks_by_their_inputs_alone() -> None:
    def grown(rebuilt: bool) -> int:
        few, many = (kept_bytes(again("zero3", *[Block("linear")] * size)[rebuilt]) for size in (2, 5))
        return many - few

    width = Recipe(()).width
    assert grown(True) == 3 * models.ROWS * width * 4
    assert grown(False) > grown(True)


@pytest.mark.parametrize("bucket_mb", chosen([0, 25], [0]))
@pytest.mark.parametrize(("shard", "times"), [("zero3", 2), ("zero2", 1), ("zero1", 1)])
def test_blocks_computed_again_are_gathered_no_more_often(shard: str, times: int, bucket_mb: float) -> None:
    what = recipe(shard, *[Block("linear")] * 3, units="pattern")
    what = replace(what, policy=replace(what.policy, recompute="unit", bucket_mb=bucket_mb))
    gathers = Counter(node.meta["mark"].unit for node in program_of(what).marked("gather"))
    assert len(gathers) == len(built(what)[1].units) == (4 if bucket_mb == 0 else len(gathers))
    assert max(gathers.values()) <= times
    inside = [node for node in crossing(program_of(what)) if node.meta["path"].startswith("blocks.")]
    assert not inside, inside  # merged or not: a region is a block


def test_dropout_is_not_drawn_again_in_a_block_that_is_computed_again() -> None:
    _, rebuilt = again("zero3", *[Block("dropped")] * 2)
    drawn = [node for node in rebuilt.graph.nodes if is_random(node)]
    assert [node.meta["phase"] for node in drawn] == ["forward"] * 2
    inside = [node for node in crossing(rebuilt) if node.meta["path"].startswith("blocks.")]
    assert {node.all_input_nodes[0] for node in inside} <= set(drawn)  # dropout's output and mask, and nothing else


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attend() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_attention_without_dropout_is_computed_again() -> None:
    model = SelfAttention()
    policy = Policy(lower="eager", recompute="unit")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = stages(model, optimizer, squares, (torch.randn(2, 4, 8),), policy)[0][-1]
    assert not any(map(is_random, program.graph.nodes))
    phases = [node.meta["phase"] for node in program.graph.nodes if "_scaled_dot_product" in str(node.target)]
    assert phases.count("backward") == 2 * phases.count("forward")  # again, and its derivative


# The same numbers.


@pytest.mark.parametrize("kind", chosen(["dropped", "normed", "nested", "mixed", "tied inside"], ["dropped", "normed"]))
def test_numbers_are_bit_for_bit_those_of_keeping_everything(kind: str) -> None:
    what = recipe("zero3", Block(kind), Block(kind), units="pattern")
    model, optimizer = models.build(what)
    program, found = None, []
    with ranks(2) as places:
        for recompute in (None, "unit"):
            policy = replace(what.policy, recompute=recompute)
            crew = [enlist(model, optimizer, policy, place, models.units(what)) for place in places]
            program = program or captured(crew[0], models.loss, models.batches(what, 1)[0][0])
            made = run(program, crew[0].plan, passes(crew[0]))
            losses = [lockstep(made, crew, row)[LOSS][0] for row in models.batches(what, 2)]
            held = [value for rank in crew for port, value in rank.values.items() if port.kind in HELD]
            found.append((made, losses, held))
    (plain, losses, held), (rebuilt, again_losses, again_held) = found
    assert plain.text() != rebuilt.text()
    assert all(map(torch.equal, losses, again_losses))
    assert all(map(torch.equal, held, again_held))  # BatchNorm's statistics, too, were updated once


HELD = ("shard", "state", "buffer")


def test_a_model_that_checkpoints_inside_its_blocks_is_computed_again_once() -> None:
    what = recipe("zero3", Block("linear", checkpoint=True), Block("linear"), units="pattern")
    plain, rebuilt = again("zero3", Block("linear"), Block("linear")), again("zero3", *what.blocks)
    assert rebuilt[1].text().count("aten.addmm(") == plain[1].text().count("aten.addmm(")
    assert rebuilt[0].text().count("aten.addmm(") < rebuilt[1].text().count("aten.addmm(")


def tower(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for block in model["blocks"]:  # type: ignore[index]
        x = x + torch.tanh(block(x))
    return x.square().mean()


def test_inductor_computes_blocks_again_too() -> None:
    def train(policy: Policy) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(6, 6) for _ in range(2))})
        sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=tower, policy=policy)
        for step in range(3):
            sharded.step(torch.randn(4, 6, generator=torch.Generator().manual_seed(step)))
        return sharded.full_state_dict()

    mine, reference = train(Policy(recompute="unit")), train(Policy(lower="eager"))
    for name, value in reference.items():
        assert (mine[name] - value).norm() <= 1e-6 * value.norm()


def test_another_kind_of_recomputation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Policy.recompute is 'all'; expected one of None, 'cheap', 'unit', 'auto'"):
        Policy(recompute="all")
