"""On CPUs gathers start as early as the peak allows; units are merged as far as FSDP2's peak allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_compiled import Policy
from fsdp_compiled.analysis.memory import Persistent
from fsdp_compiled.analysis.peak_memory import Headroom, predict
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.ir.program import Program
from fsdp_compiled.passes import SCHEDULING, run
from fsdp_compiled.plan.plan import Plan
from tests.chosen import chosen
from tests.launch import launch
from tests.simulate import before, stages

WORKER = Path(__file__).parents[1] / "workers" / "peak_memory.py"


def gpt(**policy: object) -> tuple[list[Program], Plan]:
    model = GPT(GPTConfig(layers=4, width=64, heads=2, context=32))
    batch = torch.randint(256, (2, 4, 32)).unbind()
    wanted = Policy(lower="eager", bucket_mb=0, **policy)  # type: ignore[arg-type]
    found, plan = stages(model, torch.optim.SGD(model.parameters()), next_byte_loss, batch, wanted, traced_as="gpt")
    return list(found), plan


def peak(program: Program, plan: Plan) -> int:
    return predict(program, plan, Persistent(), "gloo").peak.nbytes


def ahead_of_their_use(program: Program) -> int:
    """Gathers behind which something else runs before they are waited for."""
    return sum(node.next not in node.users for node in program.marked("gather"))


def test_what_is_ahead_by_itself_is_ahead_for_nothing() -> None:
    found, plan = gpt()
    none, one = (peak(gpt(prefetch=ahead)[0][-1], plan) for ahead in (0, 1))
    assert peak(found[-1], plan) <= none < one
    never, some, always = (gpt(prefetch=0)[0], found, gpt(prefetch=1)[0])
    ahead = [ahead_of_their_use(stages[-1]) for stages in (never, some, always)]
    assert 0 == ahead[0] < ahead[1] <= ahead[2]
    assert "gathers start only as early as the peak allows" in found[-1].notes[-2]


def test_on_a_gpu_gathers_are_ahead_whatever_they_take() -> None:
    found, plan = gpt()
    given, _ = gpt(prefetch=1)
    on_gpu = replace(plan, device=torch.device("cuda"), machine=plan.machine)
    program = run(found[before(found, "limit") - 1], on_gpu, SCHEDULING)
    assert [node.name for node in program.graph.nodes] == [node.name for node in given[-1].graph.nodes]


def test_what_is_taken_is_not_there_again() -> None:
    found, plan = gpt(prefetch=0)
    room = Headroom(found[-1], plan)
    nodes = [node for node in found[-1].graph.nodes if node.op == "call_function"]
    assert min(room.left.values()) == 0
    highest = next(at for at, node in enumerate(nodes) if room.left[node.name] == 0)
    assert room.earliest(nodes, 0, highest + 1, 1) == highest + 1 and len(room.until(nodes[0], nodes[-1], 1)) <= highest
    before = room.left[nodes[0].name]
    room.take(nodes[:1], before)
    assert room.earliest(nodes, 0, 1, 1) == 1 and room.earliest(nodes, 0, 1, 0) == 0


CASES = [("eager", False), ("eager", True), ("inductor", True)]


@pytest.mark.parametrize(("lower", "control"), chosen(CASES, CASES[:1]))
def test_a_step_takes_no_more_memory_than_fsdp2s(lower: str, control: bool) -> None:
    """The benchmark's own count on its preset of thin layers, and the control: merged for the wire alone."""
    found = launch(WORKER, 2, lower, *["control"] * control)
    (fsdp2, each), (mine, few) = found["fsdp2"], found["ours"]
    assert mine <= fsdp2 and few < 0.7 * each
    if control:
        merged, fewest = found["merged"]
        assert fsdp2 < merged and fewest < few
