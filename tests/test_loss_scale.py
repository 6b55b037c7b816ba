"""Loss scaling: step by step what `torch.amp.GradScaler` does, with nothing more on the wire."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from fsdp_compiled import LossScale, Plan, Policy, Program, compile_sharded
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_collective, role_of
from fsdp_compiled.ir.program import NORM, Port
from fsdp_compiled.passes import run
from tests.chosen import chosen
from tests.simulate import Batch, Rank, captured, enlist, lockstep, passes, ranks, simulate, stages

aten = torch.ops.aten
SHARDS = ("zero3", "zero2", "zero1", "ddp")
# Neither factor is a power of two: what is rounded elsewhere ends elsewhere.
SCALE = LossScale(init=48.0, growth=1.7, backoff=0.3, interval=3)
OVERFLOWING = {2, 3, 7}  # steps
STEPS = 11


class Net(nn.Module):
    """With BatchNorm, whose statistics eager PyTorch updates in a step that overflows, too."""

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6) if normed else nn.Identity()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def loss(model: nn.Module, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``factor`` is 1, or so large that the gradient overflows where the loss does not."""
    return model(x).square().mean() * factor


def build(normed: bool = True) -> Net:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Net(normed)


def optimizer_of(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch(index: int, overflows: bool = False, sign: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, 6, generator=generator), torch.tensor(sign * 3e38 if overflows else 1.0)


@dataclass
class Run:
    """What was seen after each step, and the model's state at the end."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    good: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0  # that the optimizer counted


def ours(policy: Policy, kind: str, rows: Sequence[Sequence[Batch]]) -> tuple[Run, Any]:
    model = build()
    sharded = compile_sharded(model, optimizer_of(model, kind), loss=loss, policy=policy)
    found = Run()
    for row in rows:
        for part in row[:-1]:
            sharded.accumulate(*part)
        found.losses.append(sharded.step(*row[-1]).item())
        found.scales.append(sharded.loss_scale.item())
        found.good.append(int(sharded.state.scale["good"]))
        found.norms.append(sharded.grad_norm.item())
    found.model = sharded.full_state_dict()
    found.updates = int(sharded.state.step)
    return found, sharded


def eager(policy: Policy, kind: str, rows: Sequence[Sequence[Batch]], broken: str = "") -> Run:
    model = build()
    optimizer = optimizer_of(model, kind)
    scaler = torch.amp.GradScaler("cpu", SCALE.init, SCALE.growth, SCALE.backoff, SCALE.interval + (broken == "late"))
    found = Run()
    for row in rows:
        losses = []
        optimizer.zero_grad()
        for part in row:
            value = loss(model, *part)
            scaler.scale(value / len(row)).backward()
            losses.append(value.item())
        if broken != "scaled":
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), policy.clip or float("inf"))
        if policy.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), policy.clip_value)
        before = copy.deepcopy(model.state_dict())
        scaler.step(optimizer)
        moved = any(not torch.equal(before[name], value) for name, value in model.named_parameters())
        found.updates += moved
        scaler.update()
        found.losses.append(sum(losses) / len(losses))
        found.scales.append(scaler.get_scale())
        found.good.append(scaler._get_growth_tracker())
        found.norms.append(norm.item())
    found.model = model.state_dict()
    return found


def rows_of(sizes: Sequence[int], odd: set[int]) -> list[list[Batch]]:
    """Rows of so many microbatches; the ``odd`` ones, counted through, overflow."""
    found, count = [], 0
    for size in sizes:
        found.append([batch(index, index in odd) for index in range(count, count + size)])
        count += size
    return found


def furthest(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == other.keys()
    return max(
        ((mine[n].double() - v.double()).norm() / v.double().norm().clamp(min=1e-6)).item() for n, v in other.items()
    )


def policy_of(**options: Any) -> Policy:
    return Policy(**{"lower": "eager", "loss_scale": SCALE, **options})


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_one_process_is_bit_for_bit_the_grad_scaler(kind: str) -> None:
    rows = rows_of([1] * STEPS, OVERFLOWING)
    mine, sharded = ours(policy_of(), kind, rows)
    theirs = eager(policy_of(), kind, rows)
    assert mine.losses == theirs.losses
    assert (mine.scales, mine.good) == (theirs.scales, theirs.good)
    ratios = {round(b / a, 2) for a, b in zip(theirs.scales, theirs.scales[1:], strict=False)}
    assert ratios == {1.0, SCALE.growth, SCALE.backoff}, "the scale has to move both ways"
    assert all(torch.equal(mine.model[name], value) for name, value in theirs.model.items())
    assert int(sharded.overflows) == len(OVERFLOWING)
    assert mine.updates == theirs.updates == STEPS - len(OVERFLOWING)
    if kind == "adamw":
        assert sharded.state.optimizer["group 0.step"] == STEPS - len(OVERFLOWING)
    assert sharded.captures == 1
    late = eager(policy_of(), kind, rows, broken="late")
    assert late.scales != mine.scales


@pytest.mark.parametrize("options", [{"clip": 0.05}, {"clip_value": 0.01}], ids=["norm", "value"])
def test_gradients_are_clipped_after_they_are_unscaled(options: dict[str, float]) -> None:
    rows = rows_of([1] * STEPS, OVERFLOWING)
    mine, _ = ours(policy_of(**options), "sgd", rows)
    theirs = eager(policy_of(**options), "sgd", rows)
    assert mine.scales == theirs.scales
    assert furthest(mine.model, theirs.model) < 1e-6
    finite = [index for index in range(STEPS) if index not in OVERFLOWING]
    for index in finite:
        assert mine.norms[index] == pytest.approx(theirs.norms[index], rel=1e-5)
        assert mine.norms[index] > 0.05
    assert furthest(mine.model, eager(policy_of(**options), "sgd", rows, broken="scaled").model) > 1e-4
    assert furthest(mine.model, eager(policy_of(), "sgd", rows).model) > 1e-4, "nothing was clipped"


@pytest.mark.parametrize("accumulate", ["shards", "full"])
def test_an_overflow_in_any_microbatch_voids_the_step_and_its_sums(accumulate: str) -> None:
    sizes = [2, 3, 1, 2, 3]
    odd = {2, 7}  # the first microbatch of the second row, the last of the fourth
    rows = rows_of(sizes, odd)
    mine, sharded = ours(policy_of(accumulate=accumulate), "sgd", rows)
    theirs = eager(policy_of(), "sgd", rows)
    assert mine.scales == theirs.scales
    assert (int(sharded.overflows), mine.updates) == (2, 3)
    assert furthest(mine.model, theirs.model) < 1e-6
    assert not any(total.any() for total in sharded.state.sums.values())
    assert furthest(mine.model, eager(policy_of(), "sgd", rows_of(sizes, {2})).model) > 1e-4


@pytest.mark.parametrize("scale", [1024, LossScale(init=1024, growth=1, backoff=1)])
def test_a_number_is_a_scale_that_stays(scale: float | LossScale) -> None:
    rows = rows_of([1] * 4, {2})
    mine, sharded = ours(policy_of(loss_scale=scale), "sgd", rows)
    assert mine.scales == [1024.0] * 4
    assert (int(sharded.overflows), mine.updates) == (1, 3)


@pytest.mark.exhaustive  # a program like any other to Inductor, of which test_lowering and test_parity have some
def test_inductor_scales_and_skips_as_eager_does() -> None:
    def train(lower: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = nn.Linear(6, 3)
        sharded = compile_sharded(model, optimizer_of(model, "sgd"), loss=loss, policy=policy_of(lower=lower))
        scales = []
        for (row,) in rows_of([1] * 6, OVERFLOWING):
            sharded.step(*row)
            scales.append(sharded.loss_scale.item())
        assert (int(sharded.overflows), int(sharded.state.step)) == (2, 4)
        return scales, sharded.full_state_dict()

    (scales, model), (expected, reference) = train("inductor"), train("eager")
    assert scales == expected
    assert furthest(model, reference) < 1e-6


# Several ranks.


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


def test_without_a_scale_the_program_has_none_of_it() -> None:
    model = build()
    program = stages(model, optimizer_of(model), loss, batch(0), Policy(lower="eager"))[0][-1]
    assert not {"scale", "unscale", "skip"} & set(program.history)
    assert not program.marked("scale")


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


# What a person sees.


def test_the_scale_is_part_of_the_state_and_apply_consumes_it() -> None:
    model = build()
    sharded = compile_sharded(model, optimizer_of(model), loss=loss, policy=policy_of())
    state = pytree.tree_map(torch.clone, sharded.state)
    state, _ = sharded.apply(state, *batch(0, overflows=True))
    assert state.scale["overflows"] == 1
    assert state.scale["factor"] == pytest.approx(SCALE.init * SCALE.backoff)
    assert (int(sharded.overflows), sharded.loss_scale.item()) == (0, SCALE.init)
    with pytest.raises(RuntimeError, match="consumed"):
        state.consume()
        _ = state.scale


def test_value_and_grad_gives_gradients_without_the_scale() -> None:
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=loss, policy=policy_of())
    value, gradients = sharded.value_and_grad(*batch(0))
    expected = loss(plain, *batch(0))
    expected.backward()
    assert value.item() == expected.item()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad.flatten(), rtol=1e-5, atol=1e-8)


def test_without_a_scale_asking_for_it_says_what_to_do() -> None:
    model = build()
    sharded = compile_sharded(model, optimizer_of(model), loss=loss, policy=Policy(lower="eager"))
    for name in ("loss_scale", "overflows"):
        with pytest.raises(RuntimeError, match=r'Policy.*loss_scale="dynamic"'):
            getattr(sharded, name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_scale": "static"}, 'Policy.loss_scale is .static.; expected None, "dynamic"'),
        ({"loss_scale": 0}, "Policy.loss_scale is 0"),
        ({"loss_scale": True}, "Policy.loss_scale is True"),
        ({"loss_scale": float("inf")}, "Policy.loss_scale is inf"),
        ({"clip_value": -1.0}, "Policy.clip_value is -1.0; expected a positive number"),
        ({"clip": 1.0, "clip_value": 1.0}, "both given; which comes first changes the result"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"init": 0.0},
        {"init": "big"},
        {"growth": 0.5},
        {"backoff": 2.0},
        {"backoff": 0},
        {"interval": 0},
        {"interval": 1.5},
    ],
)
def test_a_loss_scale_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"LossScale.{name} is"):
        replace(LossScale(), **given)


def test_the_defaults_are_those_of_the_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    theirs = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    scaling = Policy(loss_scale="dynamic").scaling
    assert scaling is not None
    assert (scaling.init, scaling.growth, scaling.backoff, scaling.interval) == theirs


def test_the_norm_that_is_reported_is_unscaled() -> None:
    model = build()
    program = stages(model, optimizer_of(model), loss, batch(0), policy_of())[0][-1]
    assert program.outputs[NORM].meta["val"].dtype == torch.float32
    one, _ = ours(policy_of(), "sgd", rows_of([1], set()))
    other, _ = ours(Policy(lower="eager", loss_scale=1), "sgd", rows_of([1], set()))
    assert one.norms == pytest.approx(other.norms, rel=1e-6)
