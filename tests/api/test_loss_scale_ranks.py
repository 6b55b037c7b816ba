"""Loss scaling on several ranks: an overflow on one voids the step on all, with nothing more on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Plan, Policy, Program
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, role_of
from fsdp_compiled.ir.program import Port
from fsdp_compiled.passes import run
from tests.chosen import chosen
from tests.scaled import SCALE, batch, build, loss, optimizer_of, policy_of
from tests.simulate import Rank, captured, enlist, lockstep, passes, ranks, simulate, stages

aten = torch.ops.aten
SHARDS = ("zero3", "zero2", "zero1", "ddp")


def states(crew: Sequence[Rank]) -> list[torch.Tensor]:
    """What an update writes, on every rank."""
    return [value.clone() for rank in crew for port, value in rank.values.items() if port.kind in ("shard", "state")]


def overflows(crew: Sequence[Rank]) -> list[int]:
    return [int(rank.values[Port("in", "scale", "overflows")]) for rank in crew]


@pytest.mark.parametrize(
    ("shard", "mesh", "kernels"),
    chosen(
        [*((shard, (2, 1), False) for shard in SHARDS), ("zero3", (3, 1), True), ("zero2", (2, 2), False)],
        [("zero1", (2, 1), False), ("ddp", (2, 1), False), ("zero3", (3, 1), True), ("zero2", (2, 2), False)],
        ids=str,
    ),
)
def test_an_overflow_on_one_rank_voids_the_step_on_all(shard: str, mesh: tuple[int, int], kernels: bool) -> None:
    world = mesh[0] * mesh[1]
    good = [batch(rank) for rank in range(world)]
    odd = [batch(rank, overflows=rank == world - 1) for rank in range(world)]
    opposite = [batch(rank, overflows=True, sign=(-1.0) ** rank) for rank in range(world)]
    model = build()
    with ranks(*mesh) as places:
        policy = policy_of(shard=shard, kernels=kernels)
        crew = [enlist(model, optimizer_of(model), policy, place) for place in places]
        program = run(captured(crew[0], loss, good[0]), crew[0].plan, passes(crew[0]))
        start = states(crew)
        lockstep(program, crew, good)
        before = states(crew)
        assert not any(map(torch.equal, before, start))
        lockstep(program, crew, odd)
        assert overflows(crew) == [1] * world
        assert all(map(torch.equal, before, states(crew)))
        lockstep(program, crew, opposite)  # the sum of infinities of both signs is not zero
        assert overflows(crew) == [2] * world
        assert all(map(torch.equal, before, states(crew)))
        lockstep(not_put_back(program, crew[0].plan), crew, odd)
        assert not any(map(torch.equal, before, states(crew)))


@pytest.mark.parametrize("kernels", [False, True])
def test_copies_of_one_buffer_at_a_time_are_alive(kernels: bool) -> None:
    """What is copied to be put back is a buffer's shard and state, and is put back before the next one is copied.

    The package's own update leaves everything as it was by itself."""
    model = build()
    program = stages(model, optimizer_of(model), loss, batch(0), policy_of(kernels=kernels, bucket_mb=0))[0][-1]
    copies: set[fx.Node] = set()
    most, order = 0, list(program.graph.nodes)
    for node in order:
        mark = node.meta.get("mark")
        if node.target is aten.clone.default and mark and mark.role == "update" and node.meta["val"].dim():
            copies.add(node)
        copies = {copy for copy in copies if any(order.index(user) >= order.index(node) for user in copy.users)}
        most = max(most, len(copies))
        assert len({copy.meta["mark"].buffer for copy in copies}) <= 1
    assert most == (0 if kernels else 3)  # the shard and both of AdamW's averages


def not_put_back(program: Program, plan: Plan) -> Program:
    """A step that overflows updates what it likes."""
    edit = Edit(program)
    for node in program.graph.nodes:
        if node.target is aten.where.self and role_of(node) == "update":
            copied = edit.map[node]
            copied.args = (copied.args[0], copied.args[2], copied.args[2])
        if "skipped" in node.kwargs:
            edit.map[node].update_kwarg("skipped", None)
    return edit.done("damage")


@pytest.mark.parametrize("shard", chosen(SHARDS, ["zero3", "ddp"]))
def test_scaling_sends_no_message_more_and_a_number_at_most(shard: str) -> None:
    def sent(rank: Rank, program: Program, kind: str) -> list[tuple[str, int]]:
        graph = run(program, rank.plan, passes(rank, kind)).graph
        nodes = [node for node in graph.nodes if node.op == "call_function" and is_collective(node)]
        return [(str(node.target), node.all_input_nodes[0].meta["val"].nbytes) for node in nodes]

    model = build()
    with ranks(2) as places:
        plain, scaled = (
            enlist(model, optimizer_of(model), policy_of(shard=shard, loss_scale=scale), places[0])
            for scale in (None, SCALE)
        )
        program = captured(plain, loss, batch(0))
        for kind in ("step", "last microbatch", "microbatch", "gradient"):
            without, with_scale = sent(plain, program, kind), sent(scaled, program, kind)
            assert [name for name, _ in with_scale] == [name for name, _ in without]
            more = [mine - other for (_, mine), (_, other) in zip(with_scale, without, strict=True)]
            assert more == [0] * (len(more) - 1) + [8 if kind != "microbatch" else 0]


# Half precision.
HALF = MixedPrecisionPolicy(param_dtype=torch.float16)


def small(model: nn.Module, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients lie below the smallest float16, 6e-8, but for their scale."""
    return model(x).float().square().mean() * 1e-6


def test_small_gradients_survive_in_half_precision_only_when_they_are_scaled() -> None:
    model = build(normed=False)
    rows = [[batch(rank) for rank in range(2)]]

    def gradients(policy: Policy) -> torch.Tensor:
        found = simulate(model, optimizer_of(model), small, rows, policy, kind="gradient").gradients
        return torch.cat([torch.cat(values) for values in found.values()])

    exact = gradients(Policy(lower="eager"))
    scaled = gradients(Policy(lower="eager", precision=HALF, loss_scale="dynamic"))
    lost = gradients(Policy(lower="eager", precision=HALF))
    assert (scaled - exact).norm() < 2e-2 * exact.norm()
    assert (lost - exact).norm() > 0.3 * exact.norm()


@pytest.mark.parametrize("world", chosen([2, 3, 4, 6], [2, 6]))
def test_half_precision_sums_do_not_overflow_where_their_mean_does_not(world: int) -> None:
    """Every rank's gradient is near the largest float16: their plain sum would be infinite."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    model = Bias()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = [[(torch.full((8,), 30000.0 + 1000 * rank),) for rank in range(world)]]
    found = simulate(
        model,
        optimizer,
        lambda model, x: model(x),
        rows,
        Policy(lower="eager", precision=HALF),
        shard=world,
        kind="gradient",
    )
    mean = sum(30000.0 + 1000 * rank for rank in range(world)) / world
    assert torch.cat(found.gradients["root"])[:8].tolist() == pytest.approx([mean] * 8, rel=2e-3)
    reductions = found.program.marked("reduce")
    assert all("sum" in node.args and "avg" not in node.args for node in reductions)
