"""Between two ranks of CPUs the program itself says what is left out of messages, and estimates count what is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, optim

from fsdp_compiled import Policy
from fsdp_compiled.analysis.timeline import estimate
from fsdp_compiled.ir.communication import carried
from fsdp_compiled.ir.nodes import is_collective
from fsdp_compiled.ir.program import Program
from fsdp_compiled.lower.backends import Backends
from fsdp_compiled.lower.fusions import Target, fusions_for
from fsdp_compiled.lower.fusions.unpadded_messages import unpadded_messages
from fsdp_compiled.passes import run
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.simulate import simulate
from tests.matrices import Matrices, loss

# A block's three matrices have 60, 60 and 24 elements: one rank holds two of them, aligned, the other one.
BYTES = {"layers.0": [240, 352], "layers.1": [368, 240]}


@pytest.fixture(scope="module")
def made() -> tuple[Program, Plan]:
    """A step, before fusions, and its plan."""
    found = simulate(
        Matrices, loss, (torch.empty(6, 6),), 2, "cpu", Policy(lower="eager", bucket_mb=0),
        optimizer=lambda parameters: optim.Muon(parameters, lr=0.02),
    )  # fmt: skip
    return found.program, found.plan


def fused(program: Program, plan: Plan, *without: str) -> Program:
    plan = replace(plan, policy=replace(plan.policy, without=without))
    return run(program, plan, fusions_for(Target(plan, (), True, Backends())))


def messages(program: Program) -> list[fx.Node]:
    """Those of the blocks; the rest has no padding."""
    found = [node for node in program.graph.nodes if node.op == "call_function" and is_collective(node)]
    return [node for node in found if (mark := node.meta.get("mark")) and mark.unit.startswith("layers")]


def test_the_program_names_what_is_sent(made: tuple[Program, Plan]) -> None:
    padded, shown = fused(*made, "unpadded_messages"), fused(*made)
    assert made[1].filled == {"layers.0": (60, 88), "layers.1": (92, 60)}
    assert padded.text() == made[0].text()  # the control
    assert shown.history == (*padded.history, "unpadded_messages")
    was, now = messages(padded), messages(shown)
    assert len(was) == len(now) == 6 and len({str(node.target) for node in now}) == 2
    for node, other in zip(was, now, strict=True):
        assert (node.name, node.meta["val"].shape) == (other.name, other.meta["val"].shape)
        whole, each = made[1].buffer(node.meta["mark"].unit).nbytes, BYTES[node.meta["mark"].unit]
        for one, parts, total in ((node, [whole // 2], whole), (other, each, sum(each))):
            assert carried(one) == ((parts, [total]) if "gather" in node.name else ([total], parts))
    lines = str(shown).splitlines()
    assert sum("all_gather: 240 B or 352 B -> 592 B, along shard (layers_0_gather" in line for line in lines) == 2
    assert sum("reduce_scatter: 608 B -> 368 B or 240 B, avg, along shard (layers_1_red" in line for line in lines) == 1
    assert shown.text().count("fsdp_compiled_pairs.all_gather_into_tensor(shard_layers_0, [60, 88], 2, 'shard')") == 2
    assert "3 reduce_scatter" in lines[0] and shown.wire != padded.wire


def test_estimates_count_what_is_sent(made: tuple[Program, Plan]) -> None:
    plan = made[1]
    slow = replace(plan, machine=replace(plan.machine, latency=0.0, network=1.0))  # a byte a second
    times = [estimate(one, slow).busy("network") for one in (fused(*made, "unpadded_messages"), fused(*made))]
    less = sum(plan.buffer(unit).nbytes - sum(each) for unit, each in BYTES.items())
    assert times[0] - times[1] == pytest.approx(3 * slow.machine.transfer(less, 2, "shard")) and less > 0


def test_elsewhere_nothing_is_set_apart(made: tuple[Program, Plan]) -> None:
    plan = made[1]
    for other in (replace(plan, shard=3), replace(plan, replicate=2), replace(plan, device=torch.device("cuda"))):
        assert plan.filled and unpadded_messages not in fusions_for(Target(other, (), True, Backends()))
