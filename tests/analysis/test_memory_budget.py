"""A budget for memory is kept by gathering less far ahead, making saved values again, then holding fewer units; or what
is missing is said."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, simulate
from fsdp_compiled.analysis.memory import Memory, Persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.ir.liveness import live_ranges, most_gathered
from fsdp_compiled.ir.nodes import AGAIN
from fsdp_compiled.ir.program import Program
from fsdp_compiled.passes import GRADIENT, SCHEDULING, run
from fsdp_compiled.passes.check import check
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.programs.memory_budget import GIB, fit
from fsdp_compiled.runtime.simulate import Estimate
from tests.models import Stack
from tests.simulate import before, stages

WIDTH = 64  # gathered parameters outweigh the activations of four rows


def fitted(memory_gb: float | None, **policy: object) -> tuple[Program, Memory, Plan]:
    wanted = Policy(**{"lower": "eager", "bucket_mb": 0, "memory_gb": memory_gb, "without": "all"} | policy)  # type: ignore[arg-type]
    found, plan = stages(Stack(6, WIDTH), None, None, (torch.ones(4, WIDTH),), wanted, kind="gradient")
    made = fit(found, plan, lambda program: predict(program, plan, Persistent()))
    return made[-1], predict(made[-1], plan, Persistent()), plan


def ahead_first(shard: str) -> list[str]:
    """What is tried on a GPU, whose gathers start ahead whatever it takes, by what is said of it."""
    wanted = Policy(lower="eager", bucket_mb=0, shard=shard, without="all")
    found, plan = stages(Stack(6, WIDTH), None, None, (torch.ones(4, WIDTH),), wanted, kind="gradient")
    on_gpu = replace(plan, device=torch.device("cuda"))
    made: list[Program] = []
    run(found[before(found, "limit") - 1], on_gpu, SCHEDULING, made.append)
    whole, said = [*found[: before(found, "limit") - 1], *made], []

    def predicted(program: Program) -> Memory:
        return predict(program, on_gpu, Persistent())

    height = predicted(whole[-1]).peak.nbytes
    for _ in range(8):
        tight = replace(on_gpu, policy=replace(wanted, memory_gb=(height - 1) / GIB))
        program = fit(whole, tight, predicted)[-1]
        if predicted(program).peak.nbytes >= height:
            break
        height = predicted(program).peak.nbytes
        said.append(program.notes[-1].split(":")[0])
    return said


def test_on_a_gpu_gathers_ahead_go_first() -> None:
    assert ahead_first("zero3") == ["prefetch=0"]
    limited = ahead_first("zero2")  # where nothing is gathered for backward, ahead or not
    assert len(limited) >= 2 and all(one.startswith("prefetch=0, limit=") for one in limited)


def test_without_a_budget_and_within_it_nothing_changes() -> None:
    free, memory, _ = fitted(None)
    roomy, _, _ = fitted(2 * memory.peak.nbytes / GIB)
    assert roomy.text() == free.text() and roomy.notes == free.notes
    assert any("prefetch=1 (auto)" in note for note in free.notes)


def test_the_peak_comes_down_step_by_step() -> None:
    """Each budget just under the last peak: more and more units are gathered again."""
    program, memory, _ = fitted(None, shard="zero2", prefetch="auto")
    gathers = len(program.marked("gather"))
    heights, alive = [memory.peak.nbytes], [most_gathered(live_ranges(program.graph))]
    for _ in range(6):
        program, memory, plan = fitted((heights[-1] - 1) / GIB, shard="zero2")
        if memory.peak.nbytes >= heights[-1]:
            break
        heights.append(memory.peak.nbytes)
        alive.append(most_gathered(live_ranges(program.graph)))
        assert "the first that fits" in program.notes[-1]
        assert plan.policy.limit == "auto"
    assert len(heights) >= 3 and alive == sorted(alive, reverse=True)
    assert len(program.marked("gather")) > gathers


class Ends(nn.Module):
    """The root is read where forward begins and where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(50, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.linear(x, self.table.weight).square().mean()


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_whatever_the_budget_the_program_holds_and_a_lower_one_takes_no_more(lower: str) -> None:
    """A unit that a limit gathers again within a phase is not taken for one that a pass gathered twice."""
    wanted = Policy(lower=lower, bucket_mb=0, shard="zero2", without="all")  # type: ignore[arg-type]
    found, plan = stages(Ends(), None, None, (torch.zeros(16, dtype=torch.int64),), wanted, kind="gradient")

    def predicted(program: Program) -> Memory:
        check(program, plan)
        return predict(program, plan, Persistent())

    peak, heights, again = predicted(found[-1]).peak.nbytes, [], 0
    for part in (0.9, 0.7, 0.5, 0.3):
        tight = replace(plan, policy=replace(wanted, memory_gb=part * peak / GIB))
        program = fit(found, tight, predicted, GRADIENT)[-1]
        heights.append(predicted(program).peak.nbytes)
        again += sum(node.meta["mark"].purpose == AGAIN for node in program.marked("gather"))
    assert heights == sorted(heights, reverse=True) and heights[-1] < peak and again > 0


def test_a_step_that_is_simulated_keeps_the_budget_too() -> None:
    def estimated(memory_gb: float | None) -> Estimate:
        policy = Policy(lower="eager", shard="zero2", bucket_mb=0, memory_gb=memory_gb, without="all")
        model = lambda: Stack(4, WIDTH)  # noqa: E731
        return simulate(model, lambda made, x: made(x).square().mean(), (torch.empty(4, WIDTH),), 2, policy=policy)

    peak = estimated(None).memory.peak.nbytes
    tight = estimated((peak - 1) / GIB)
    assert tight.memory.peak.nbytes < peak and "the first that fits" in tight.program.notes[-1]


def test_what_was_given_is_kept() -> None:
    _, memory, _ = fitted(None, prefetch=2)
    program, _, _ = fitted(memory.peak.nbytes / 2 / GIB, prefetch=2, limit=4)
    assert "nothing fits" in program.notes[-1] and most_gathered(live_ranges(program.graph)) <= 4
    _, memory, _ = fitted(None, prefetch=1, shard="zero2")
    program, _, _ = fitted((memory.peak.nbytes - 1) / GIB, prefetch=1, shard="zero2")
    assert "prefetch=1, limit=" in program.notes[-1]


def test_a_budget_that_cannot_be_kept_is_told_with_a_cure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        program, memory, _ = fitted(1e-9, shard="zero2")
    assert "nothing fits memory_gb=1e-09; the least is" in caplog.text and "A smaller batch" in caplog.text
    assert memory.peak.nbytes < fitted(None, shard="zero2")[1].peak.nbytes and program.notes[-1] in caplog.text
