"""Every combination of placement, precision, accumulation, clipping and recomputation trains as eager PyTorch does.

The reference is one process that holds the parameters in float32, knows every rank's batch, computes each rank's
gradient with autograd in the precision that is asked for, and does the rest in float32: mean over ranks and
microbatches, `GradScaler`'s rule, clipping, SGD. In float32 programs are within 1e-6 of it. In a shorter format, the
wire and the sums on it round besides, once for every number that is added: ``ROUNDINGS * eps`` of the update.
Numbers could agree though something was left out, so each program's collectives are counted, with their dtypes.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, Program, compile_sharded
from fsdp_compiled.ir.nodes import gathered, is_collective, role_of
from fsdp_compiled.ir.program import Port
from fsdp_compiled.passes import run
from tests.chosen import chosen
from tests.simulate import Batch, Simulation, captured, enlist, lockstep, passes, ranks

PLACEMENTS = ("zero3", "zero2", "zero1", "ddp")
PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATIONS = (None, "shards", "full")
CLIPS = (None, "norm", "value")
RECOMPUTES = (None, "unit")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH, ROWS, BLOCKS = 8, 4, 2
MICROBATCHES = 2
ROUNDINGS = 4
RATE = 0.5
LIMITS = {"norm": 0.01, "value": 0.002}


@dataclass(frozen=True)
class Case:
    shard: str
    precision: str
    accumulate: str | None
    clip: str | None
    recompute: str | None
    mesh: tuple[int, int] = (2, 1)

    def __str__(self) -> str:
        parts = [self.shard, self.precision, self.accumulate or "one-batch", self.clip or "no-clip"]
        parts += [self.recompute or "keep"] + ["x".join(map(str, self.mesh))] * (self.mesh != (2, 1))
        return "-".join(parts)

    @property
    def world(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def policy(self) -> Policy:
        dtype = DTYPES[self.precision]
        return Policy(
            shard=self.shard,
            precision=MixedPrecisionPolicy(param_dtype=dtype) if dtype != torch.float32 else MixedPrecisionPolicy(),
            loss_scale="dynamic" if self.precision == "fp16" else None,
            clip=LIMITS["norm"] if self.clip == "norm" else None,
            clip_value=LIMITS["value"] if self.clip == "value" else None,
            accumulate=self.accumulate or "shards",
            recompute=self.recompute,
            bucket_mb=0,
            lower="eager",
        )

    @property
    def bound(self) -> float:
        return 1e-6 if self.precision == "fp32" else ROUNDINGS * torch.finfo(DTYPES[self.precision]).eps


EVERY = [Case(*values) for values in itertools.product(PLACEMENTS, PRECISIONS, ACCUMULATIONS, CLIPS, RECOMPUTES)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.stem
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x).float(), y) * factor


def build() -> tuple[Tower, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Tower()
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def batch(index: int, factor: float = 0.1) -> Batch:
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)
    return x, y, torch.tensor(factor)


def steps(case: Case) -> list[list[list[Batch]]]:
    """``[step][microbatch][rank]``. In fp16 there is a step before, which overflows in one batch of the last rank."""
    count = MICROBATCHES if case.accumulate else 1
    rows = [[batch(10 * micro + rank) for rank in range(case.world)] for micro in range(count)]
    if case.precision != "fp16":
        return [rows]
    return [[*rows[:-1], [*rows[-1][:-1], batch(99, factor=1e5)]], rows]


@dataclass
class Reference:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    scale: float | None
    overflows: int


def reference(case: Case, start: dict[str, torch.Tensor]) -> Reference:
    dtype, scaling = DTYPES[case.precision], case.policy.scaling
    scaler = torch.amp.GradScaler("cpu", enabled=scaling is not None)
    model, optimizer = build()
    model.load_state_dict(start)
    found = Reference([], [], {}, None, 0)
    for rows in steps(case):
        batches = [one for row in rows for one in row]
        sums = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        losses = []
        for x, y, factor in batches:
            low = {name: value.detach().to(dtype).requires_grad_() for name, value in model.named_parameters()}
            value = F.mse_loss(torch.func.functional_call(model, low, x.to(dtype)).float(), y) * factor
            gradients = torch.autograd.grad(scaler.scale(value), list(low.values()))
            for name, gradient in zip(low, gradients, strict=True):
                sums[name] += gradient.float() / len(batches)
            losses.append(value.item())
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name]
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMITS["norm"] if case.clip == "norm" else float("inf"))
        if case.clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), LIMITS["value"])
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        found.overflows += scaler.get_scale() < before
        found.losses.append(sum(losses) / len(losses))
        found.norms.append(norm.item())
    found.parameters = {name: value.detach() for name, value in model.named_parameters()}
    found.scale = scaler.get_scale() if scaling else None
    return found


@functools.cache
def program_before(precision: str) -> Program:
    """The captured program, which depends on nothing else of the combination."""
    case = Case("zero3", precision, None, None, None)
    model, optimizer = build()
    with ranks(2) as places:
        return captured(enlist(model, optimizer, case.policy, places[0]), loss, batch(0))


@functools.cache
def microbatch(case: Case) -> Program:
    """The program of a microbatch, to which clipping is nothing."""
    model, optimizer = build()
    before = program_before(case.precision)
    with ranks(*case.mesh) as places:
        rank = enlist(model, optimizer, case.policy, places[0])
        return run(before, rank.plan, passes(rank, "microbatch"))


def trained(case: Case) -> tuple[Simulation, Program | None]:
    """The ranks after all steps, with the program of the last microbatch; and the one of those before it."""
    model, optimizer = build()
    adding = microbatch(replace(case, clip=None)) if case.accumulate else None
    before = program_before(case.precision)
    with ranks(*case.mesh) as places:
        crew = [enlist(model, optimizer, case.policy, place) for place in places]
        program = run(before, crew[0].plan, passes(crew[0], "last microbatch" if case.accumulate else "step"))
        simulation = Simulation(crew, (program,))
        for *rows, last in steps(case):
            for row in rows:
                assert adding is not None
                lockstep(adding, crew, row)
            simulation.step(last)
    return simulation, adding


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


def furthest(case: Case, simulation: Simulation, theirs: Reference, start: dict[str, torch.Tensor]) -> float:
    """The largest relative error of losses, of the last norm and of parameters; in short formats, of their updates."""
    found = [abs(mine.item() / other - 1) for mine, other in zip(simulation.losses, theirs.losses, strict=True)]
    found.append(abs(simulation.norms[-1].item() / theirs.norms[-1] - 1))
    for name, value in simulation.parameters.items():
        origin = 0.0 if case.precision == "fp32" else start[name]
        found.append(distance(value - origin, theirs.parameters[name] - origin))
    return max(found)


def check_numbers(case: Case, simulation: Simulation) -> None:
    start = {name: value.detach().clone() for name, value in build()[0].named_parameters()}
    theirs = reference(case, start)
    assert furthest(case, simulation, theirs, start) < case.bound
    assert simulation.replicas_agree
    assert not any(free.any() for free in simulation.padding)
    if theirs.scale is not None:
        assert theirs.overflows == 1, "the first step has to overflow"
        for rank in simulation.ranks:
            assert rank.values[Port("in", "scale", "factor")].item() == theirs.scale
            assert rank.values[Port("in", "scale", "overflows")].item() == 1


def sent(program: Program, kind: str) -> list[fx.Node]:
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and is_collective(node)]
    return [node for node in nodes if kind in str(node.target)]


def check_wire(case: Case, program: Program, kind: str) -> None:
    """As many collectives as the placement asks for, in the dtype of the precision, and one message for the rest."""
    units, dtype = BLOCKS + 1, DTYPES[case.precision]
    inside = {"zero3": 2 * units - 1, "zero2": units, "zero1": units, "ddp": 0}[case.shard]
    reduces = kind != "microbatch" or case.accumulate != "full"
    scatters = case.shard in ("zero3", "zero2")
    gathers, reductions = (
        sent(program, "all_gather"),
        [node for node in program.marked("reduce") if is_collective(node)],
    )
    reports = [node for node in sent(program, "all_reduce") if role_of(node) == "norm"]
    axes = 1 + (case.mesh[1] > 1)
    assert len(gathers) == inside
    assert Counter("scatter" if "scatter" in str(node.target) else "all" for node in reductions) == Counter(
        {"scatter": units * reduces * scatters, "all": units * reduces * (axes - scatters)}
    )
    assert len(reports) == (axes if kind != "microbatch" else 0)
    assert len(gathers) + len(reductions) + len(reports) == len(sent(program, ""))
    assert {node.all_input_nodes[0].meta["val"].dtype for node in gathers + reductions} <= {dtype}
    packet = 8 + (case.precision == "fp16")  # loss, squares, three parts of the call and their squares
    assert {tuple(node.meta["val"].shape) for node in reports} <= {(packet,)}


def check_acted(case: Case, program: Program, kind: str) -> None:
    """The fields of the policy show in the program."""
    text = program.text()
    assert ("scale" in program.history) == (case.precision == "fp16")
    if kind != "microbatch":
        assert text.count("aten.clamp(") == {None: 0, "norm": 1, "value": BLOCKS + 1}[case.clip]
        assert text.count("aten.linalg_vector_norm(") == (BLOCKS + 1) * (1 + (case.precision == "fp16"))
    held = {node for nodes in gathered(program.graph).values() for node in nodes}
    crossing = {
        node
        for node in program.graph.nodes
        if node.op == "call_function"
        and node.meta["phase"] == "forward"
        and node not in held
        and node.meta.get("path", "").startswith("blocks.")
        and any(user.op == "call_function" and user.meta["phase"] == "backward" for user in node.users)
    }
    assert bool(crossing) == (case.recompute is None)


def check_case(case: Case) -> None:
    simulation, adding = trained(case)
    check_numbers(case, simulation)
    for program, kind in ((simulation.program, "last"), (adding, "microbatch")):
        if program is not None:
            check_wire(case, program, kind)
            check_acted(case, program, kind)


def covering(cases: list[Case], fields: int) -> Iterator[Case]:
    """A few of the cases that show all values together of so many fields; the next is the one that shows most new."""

    def shown(case: Case) -> set[tuple[object, ...]]:
        return set(itertools.combinations(vars(case).items(), fields))

    missing = set().union(*map(shown, cases))
    while missing:
        best = max(cases, key=lambda case: len(shown(case) & missing))
        missing -= shown(best)
        yield best


# On four ranks all values of any two fields meet, the mesh among them; on two, each value is seen. The other
# combinations are for `make test-all`.
MESHES = ((4, 1), (2, 2))
ON_FOUR = [replace(case, mesh=mesh) for case in EVERY for mesh in MESHES]
TWO = list(covering(EVERY, 1))
PAIRS = list(covering(EVERY, 2))
FOUR = list(covering(ON_FOUR, 2))


@pytest.mark.parametrize("case", chosen(EVERY, TWO, ids=str))
def test_every_combination_on_two_ranks(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("case", chosen(ON_FOUR, FOUR, ids=str))
def test_every_combination_on_four_ranks(case: Case) -> None:
    check_case(case)


def test_the_lists_are_complete() -> None:
    assert len(set(EVERY)) == 4 * 3 * 3 * 3 * 2
    values = {
        "shard": PLACEMENTS, "precision": PRECISIONS, "accumulate": ACCUMULATIONS, "clip": CLIPS,
        "recompute": RECOMPUTES, "mesh": MESHES,
    }  # fmt: skip
    for cases, fields, together in ((TWO, [*values][:5], 1), (FOUR, [*values], 2)):
        for some in itertools.combinations(fields, together):
            seen = {tuple(getattr(case, field) for field in some) for case in cases}
            assert seen == set(itertools.product(*(values[field] for field in some)))


# What the comparison must notice: the reference of a neighbour is not the case's own.

BASE = Case("zero3", "fp32", "shards", None, None)


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (BASE, replace(BASE, clip="norm")),
        (BASE, replace(BASE, clip="value")),
        (replace(BASE, clip="norm"), replace(BASE, clip="value")),
        (BASE, replace(BASE, precision="bf16")),
        (replace(BASE, accumulate=None), BASE),
        (replace(BASE, precision="bf16"), replace(BASE, precision="bf16", clip="norm")),
        (replace(BASE, precision="bf16", clip="value"), replace(BASE, precision="bf16", clip="norm")),
        (replace(BASE, precision="fp16", clip="value"), replace(BASE, precision="fp16")),
    ],
    ids=str,
)
def test_the_numbers_of_another_combination_are_noticed(case: Case, other: Case) -> None:
    start = {name: value.detach().clone() for name, value in build()[0].named_parameters()}
    simulation, _ = trained(case)
    assert furthest(case, simulation, reference(case, start), start) < case.bound
    assert furthest(case, simulation, reference(other, start), start) > case.bound


@pytest.mark.parametrize("field", chosen(["precision", "accumulate", "recompute", "clip"], ["precision", "recompute"]))
def test_the_program_of_another_combination_is_noticed(field: str) -> None:
    other = {"precision": "fp16", "accumulate": "full", "recompute": "unit", "clip": "value"}[field]
    simulation, adding = trained(BASE)
    assert adding is not None
    wrong = replace(BASE, **{field: other})
    with pytest.raises(AssertionError):
        for program, kind in ((simulation.program, "last"), (adding, "microbatch")):
            check_wire(wrong, program, kind)
            check_acted(wrong, program, kind)


# What is not allowed, and what is said; where a policy alone tells, it is never made.

HALF = MixedPrecisionPolicy(param_dtype=torch.int8)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"shard": "zero4"}, "Policy.shard is 'zero4'; expected one of 'zero3', 'zero2', 'zero1', 'ddp'"),
    ({"precision": "bf16"}, "Policy.precision is a str; expected torch.distributed.fsdp.MixedPrecisionPolicy"),
    ({"precision": HALF}, "Policy.precision.param_dtype is torch.int8; expected a floating-point dtype"),
    ({"accumulate": "none"}, "Policy.accumulate is 'none'; expected one of 'shards', 'full'"),
    ({"clip": 0.0}, "Policy.clip is 0.0; expected a positive number"),
    ({"clip_value": "big"}, "Policy.clip_value is 'big'; expected a positive number"),
    ({"clip": 1.0, "clip_value": 1.0}, "both given; which comes first changes the result"),
    ({"recompute": "block"}, "Policy.recompute is 'block'; expected one of None"),
    ({"loss_scale": "auto"}, "Policy.loss_scale is 'auto'; expected None"),
    ({"limit": 1, "prefetch": 1}, "Policy.limit=1 leaves no room for prefetch=1"),
    ({"lower": "triton"}, "Policy.lower is 'triton'"),
    ({"offload": True}, "Policy.offload is True, but the model is on cpu: its shards are in host memory already"),
    ({"offload": True, "shard": "ddp"}, 'under shard="ddp" there are none'),
    ({"offload": True, "cuda_graph": True}, "which no CUDA graph of it could do"),
    ({"offload": "cpu"}, "Policy.offload is 'cpu'; expected one of False, True"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=["-".join(given) for given, _ in REFUSED])
def test_what_is_not_allowed_is_refused_before_anything_is_changed(given: dict[str, Any], message: str) -> None:
    model, optimizer = build()
    with pytest.raises(ValueError, match=re.escape(message)):
        compile_sharded(model, optimizer, loss=loss, policy=Policy(**given))
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("case", chosen(PAIRS, PAIRS[::3], ids=str))
def test_what_is_allowed_is_taken(case: Case) -> None:
    model, optimizer = build()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=case.policy)
    before = [shard.clone() for shard in sharded.state.parameters.values()]
    if case.accumulate:
        sharded.accumulate(*batch(0))
    sharded.step(*batch(1))
    assert not any(map(torch.equal, before, sharded.state.parameters.values()))
