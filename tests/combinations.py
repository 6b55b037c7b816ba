"""Every combination of placement, precision, accumulation, clipping and recomputation: a case, what it trains, and the
same by eager PyTorch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, Program
from fsdp_compiled.passes import run
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


def covering(cases: list[Case], fields: int) -> Iterator[Case]:
    """A few of the cases that show all values together of so many fields; the next is the one that shows most new."""

    def shown(case: Case) -> set[tuple[object, ...]]:
        return set(itertools.combinations(vars(case).items(), fields))

    missing = set().union(*map(shown, cases))
    while missing:
        best = max(cases, key=lambda case: len(shown(case) & missing))
        missing -= shown(best)
        yield best
