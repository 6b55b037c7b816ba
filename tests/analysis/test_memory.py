"""Memory as it was predicted against what the allocator did.

On ranks that only seem to be there (a process group that sends nothing) models of all kinds are measured in one
process; on two real ones what gloo needs is measured too. What is predicted is in fact what happens, to the byte, but
for the kernels of oneDNN; the claim is 5 per cent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.analysis.memory import Memory, persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.program import CALL, CALL_PARTS, Port, Program
from fsdp_compiled.passes import run
from fsdp_compiled.plan.hardware import PEAK_ERROR
from fsdp_compiled.plan.plan import Plan
from tests import models
from tests.allocator import Gathers, Recording, held, record
from tests.chosen import chosen, examples
from tests.launch import launch
from tests.parts import parts
from tests.simulate import captured, enlist, lower, passes, ranks

WORKER = Path(__file__).parents[1] / "workers" / "memory.py"
BOUND = PEAK_ERROR
EAGER = Policy(lower="eager", bucket_mb=0)


@dataclass
class Measured:
    """What was predicted for a program, and what one run of it did."""

    stages: tuple[Program, ...]
    plan: Plan
    predicted: Memory
    recording: Recording
    gathers: Gathers
    given: int  # bytes of the program's inputs
    moved: bool  # whether anything that it updates in place changed its place

    @property
    def beyond(self) -> int:
        """What is predicted to be alive at the peak beyond state and batch."""
        return self.predicted.peak.nbytes - self.predicted.persistent.total - self.predicted.batch


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Any,
    batch: tuple[torch.Tensor, ...],
    policy: Policy = EAGER,
    *,
    shard: int = 2,
    units: Any = None,
    damage: Any = None,
) -> Measured:
    with ranks(shard) as places:
        rank = enlist(model, optimizer, policy, places[0], units)
        stages: list[Program] = []
        program = run(captured(rank, loss, batch), rank.plan, passes(rank), stages.append)
        if damage is not None:
            program = damage(program)
        state = persistent(rank.plan, rank.rules, rank.named("buffer"), rank.named("constant"), program)
        predicted = predict(program, rank.plan, state, "fake")
        # Zero agrees with the sum of itself and of what nobody sent.
        rank.values[CALL] = torch.zeros(CALL_PARTS, dtype=torch.float64)
        inputs = rank.inputs(program, batch)
        runner = lower(program, rank.mesh.groups, "eager")

        def once() -> None:
            number = torch.zeros(CALL_PARTS, dtype=torch.float64)  # made for every step
            with torch.no_grad():
                runner(*(number if port.kind == "call" else value for port, value in zip(ports, inputs, strict=True)))

        ports = list(program.inputs)
        once()
        before = [tensor.data_ptr() for tensor in inputs]
        with record() as recording:
            once()
        with Gathers() as gathers:
            once()
        moved = before != [tensor.data_ptr() for tensor in inputs]
    return Measured(tuple(stages), rank.plan, predicted, recording, gathers, held(inputs), moved)


def check(measured: Measured) -> None:
    assert measured.beyond == pytest.approx(measured.recording.peak, rel=BOUND)
    assert measured.recording.kept == 0 and measured.gathers.alive == 0 and not measured.moved


def gpt(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GPT(GPTConfig(layers=layers, width=width, heads=2, context=64))
    return model, torch.optim.AdamW(model.parameters())


def words(rows: int, length: int = 64) -> tuple[torch.Tensor, ...]:
    return torch.randint(256, (2, rows, length)).unbind()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 32), (32, 64), (64, 32))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(*size, 3, padding=1), nn.BatchNorm2d(size[1]), nn.ReLU(), nn.Dropout(0.1))
            for size in sizes
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.max_pool2d(layer(x), 2)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("shard", "layers", "width", "rows"),
    chosen(
        [("zero3", 3, 64, 8), ("zero3", 2, 192, 1), ("zero2", 2, 192, 1), ("zero1", 2, 192, 1), ("ddp", 2, 64, 8)],
        [("zero3", 3, 64, 8)],  # every placement is on two real ranks below
    ),
)
def test_the_peak_of_a_gpt(shard: str, layers: int, width: int, rows: int) -> None:
    """Where activations weigh more, and where parameters do."""
    check(measure(*gpt(layers, width), next_byte_loss, words(rows), replace(EAGER, shard=shard, clip=1.0)))


@pytest.mark.parametrize("shard", chosen([1, 4], [4]))
def test_the_peak_on_other_worlds(shard: int) -> None:
    check(measure(*gpt(2, 128), next_byte_loss, words(2), shard=shard))


def test_the_peak_of_mixed_precision() -> None:
    """In double and single precision: a CPU's kernels for half precision have memory of their own."""
    model, optimizer = gpt(2, 128)
    model.double()
    precision = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float64, cast_forward_inputs=False, output_dtype=torch.float64
    )
    model.register_buffer("cos", model.cos.float(), persistent=False)
    model.register_buffer("sin", model.sin.float(), persistent=False)
    check(measure(model, optimizer, next_byte_loss, words(2), replace(EAGER, precision=precision)))


def test_the_peak_of_convolutions() -> None:
    model = Convolutions()
    batch = (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    check(measure(model, optimizer, lambda model, x, y: F.cross_entropy(model(x), y), batch))


@contextmanager
def sized(words: int, rows: int) -> Iterator[None]:
    """Generated models with batches large enough for 5 per cent to be more than a few numbers."""
    before = models.WORDS, models.ROWS
    models.WORDS, models.ROWS = words, rows
    try:
        yield
    finally:
        models.WORDS, models.ROWS = before


@settings(max_examples=examples(4, 8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(models.recipes())
def test_the_peak_of_generated_models(recipe: models.Recipe) -> None:
    recipe = replace(recipe, width=64 + 32 * (recipe.width % 3), hidden=128 + 16 * recipe.hidden, replicate=1)
    with sized(256, 64):
        model, optimizer = models.build(recipe)
        batch = models.batches(recipe, 1)[0][0]
        units, policy = models.units(recipe), replace(recipe.policy, bucket_mb=0)
        check(measure(model, optimizer, models.loss, batch, policy, shard=recipe.shard, units=units))


def test_a_gathered_unit_that_is_kept_is_predicted_and_measured() -> None:
    def keep(program: Program) -> Program:
        edit = Edit(program)
        full = next(node for node in program.marked("wait") if node.meta["mark"].unit == "layers.0")
        edit.set_output(Port("out", "aux", "kept"), edit.map[full])
        return edit.done("keep")

    never_ahead = replace(EAGER, prefetch=0)
    whole = measure(*gpt(2, 192), next_byte_loss, words(1), never_ahead)
    broken = measure(*gpt(2, 192), next_byte_loss, words(1), never_ahead, damage=keep)
    assert broken.beyond == pytest.approx(broken.recording.peak, rel=BOUND)
    unit = whole.plan.buffer("layers.0").nbytes
    assert broken.beyond - whole.beyond == broken.recording.peak - whole.recording.peak == unit
    assert broken.gathers.most == whole.gathers.most + 1


def test_a_prediction_without_resharding_is_noticed() -> None:
    measured = measure(*gpt(3, 192), next_byte_loss, words(1))
    check(measured)
    kept = next(program for program in measured.stages if program.history[-1] == "reduce")
    wrong = predict(kept, measured.plan, measured.predicted.persistent, "fake")
    off = wrong.peak.nbytes - measured.predicted.peak.nbytes
    assert off > BOUND * measured.recording.peak


def test_an_update_holds_one_temporary_of_a_shard_at_a_time() -> None:
    """No second copy of parameters, gradients or optimizer state: every write is in place, and what a buffer's
    arithmetic needs is freed before the next buffer's turn."""
    policy = replace(EAGER, clip=1.0, without=("in_place_all_reduce",))  # so that the all-reduce allocates, and is seen
    measured = measure(*gpt(6, 128), next_byte_loss, words(1, 16), policy)
    check(measured)
    within = [" ".join(event.within) for event in measured.recording.events]
    begun = max(index for index, names in enumerate(within) if "all_reduce" in names)  # of the loss and the norm
    names = [moment.node for moment in measured.predicted.timeline]
    (sent,) = (node for node in measured.stages[-1].marked("norm") if "all_reduce" in str(node.target))
    updates = measured.predicted.timeline[names.index(sent.name) :]
    predicted = max(moment.nbytes for moment in updates) - measured.predicted.peak.nbytes + measured.beyond
    assert predicted == pytest.approx(max(measured.recording.live[begun:]), rel=BOUND)
    shards = [measured.plan.shard_numel(buffer) * buffer.dtype.itemsize for buffer in measured.plan.buffers]
    assert 0 < predicted - sum(shards) < 1.1 * max(shards) < sum(shards)  # beyond the reduced gradients


@pytest.mark.parametrize("name", chosen(["AdamW", "SGD", "Adagrad", "RMSprop"], ["AdamW"]))
def test_persistent_bytes_are_exact(name: str) -> None:
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    for accumulate in (False, True):
        norm = nn.Tanh() if accumulate else nn.BatchNorm1d(33)  # which on a CPU takes no bfloat16
        model = nn.Sequential(nn.Linear(17, 33), norm, nn.Linear(33, 1, dtype=torch.float32))
        model.register_buffer("unused", torch.zeros(5))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        policy = EAGER
        if accumulate:
            policy = replace(EAGER, loss_scale="dynamic", precision=MixedPrecisionPolicy(torch.bfloat16), copies=True)
        with parts() as of:
            sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=policy)
        if accumulate:
            sharded.accumulate(torch.randn(4, 17))
        sharded.step(torch.randn(4, 17))
        state = sharded.state
        found = sharded.memory.persistent
        assert found.parameters == held(state.parameters) == sharded.plan.persistent_bytes
        assert found.optimizer == held(state.optimizer)
        assert found.buffers == held(state.buffers)
        assert found.sums == held(state.sums) and (found.sums > 0) == accumulate
        copies = of(sharded).copies.tensors
        assert found.copies == held(copies) == sharded.plan.copy_bytes and (found.copies > 0) == accumulate
        rank = torch.zeros(1, dtype=torch.int64)
        assert found.total == held((state, of(sharded).hyperparameters.tensors, rank, copies))
        if accumulate:
            assert sharded.plan.sum_bytes() + 16 == found.sums  # with their count and the loss


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    return launch(WORKER, 2)


def test_two_real_ranks(real: dict[str, Any]) -> None:
    for name, found in real.items():
        assert found["persistent"]["predicted"] == found["persistent"]["real"], name
        predicted, peak = found["peak"]["predicted"], found["peak"]["real"]
        # Whether gloo still copies a unit that was gathered ahead is for the wire to say; at most, it is predicted.
        early = found["wire"] if name.split()[0] in ("ahead", "limit") else 0
        off = BOUND * found["beyond"]
        assert predicted - early - off <= peak <= predicted + off, (name, found)
        assert found["gathers"]["left"] == 0
    assert real["zero3 wide step"]["gathers"]["most"] < real["zero1 step"]["gathers"]["most"]
    assert real["ddp step"]["gathers"]["most"] == 0
    # The root and two blocks: without a limit, "zero2" holds all three.
    alive = {name: found["gathers"]["most"] for name, found in real.items()}
    assert [alive[f"limit {most} step"] for most in (1, 2)] == [1, 2] and alive["zero2 last"] == 3


def test_what_is_printed_and_dumped(tmp_path: Path) -> None:
    model, optimizer = gpt(2, 64)
    sharded = compile_sharded(model, optimizer, loss=next_byte_loss, policy=EAGER)
    sharded.step(*words(1))
    memory, text = sharded.memory, str(sharded.program)
    assert all(line in text for line in memory.lines())
    assert str(memory.peak) in text and memory.peak.node in {node.name for node in sharded.program.graph.nodes}
    assert sum(memory.at_peak().values()) == pytest.approx(memory.peak.nbytes, abs=6000)  # the generator's state
    folder = sharded.dump(tmp_path / "dump")
    dumped = (folder / "memory.txt").read_text()
    assert dumped.count("<- peak") == 1 and "layers.1" in dumped
    assert all(line in (folder / "program.txt").read_text() for line in memory.lines())


def test_sizes_that_move_are_counted_as_traced() -> None:
    found = []
    for policy in (EAGER, replace(EAGER, dynamic=True)):
        model, optimizer = gpt(1, 64)
        sharded = compile_sharded(model, optimizer, loss=next_byte_loss, policy=policy)
        sharded.step(*words(4))
        found.append(sharded.memory.peak.nbytes)
        sharded.step(*words(6))
    assert sharded.captures == 1
    assert found[1] == pytest.approx(found[0], rel=BOUND)
