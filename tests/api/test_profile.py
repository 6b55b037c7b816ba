"""Steps that are measured: the same numbers, spans by unit on both lowerings, traces with arrows, and one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.analysis.timeline import WAIT, Span, Timeline, measured
from fsdp_compiled.runtime.profiling import sentence
from tests.launch import launch
from tests.models import Stack
from tests.simulate import stages

LAYERS = 4


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("profiles")
    return launch(Path(__file__).parents[1] / "workers" / "profiled.py", 2, str(folder)), folder


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_steps_that_are_measured_are_the_same_steps(seen: tuple[dict[str, Any], Path], lower: str) -> None:
    found, folder = seen[0][lower], seen[1] / lower
    assert found["losses"] == found["plain"] and len(set(found["losses"])) == 7
    assert found["steps"] == 3
    assert 0 < found["exposed"] < found["seconds"] and 0 < found["compute"] < found["seconds"]
    assert found["exposed"] + found["compute"] <= found["seconds"] * (1 + 1e-9)
    assert found["sent"] == found["collectives"] > 2 * LAYERS
    assert {f"layers.{n}" for n in range(LAYERS)} < set(found["units"])
    assert found["text"].startswith("The step is bound by ") and "3 steps measured" in found["text"]
    for path in (folder / "trace.json", folder / "alone.json"):
        events = json.loads(path.read_text())["traceEvents"]
        for process in (1, 2):  # predicted, and measured
            own = [one for one in events if one["pid"] == process]
            units = {one["name"] for one in own if one["ph"] == "X" and one["cat"] == "compute"}
            assert {f"layers.{n}" for n in range(LAYERS)} < units
            begun = {one["id"]: one["ts"] for one in own if one["ph"] == "s"}
            ended = {one["id"]: one["ts"] for one in own if one["ph"] == "f"}
            assert begun.keys() == ended.keys() and len(begun) == found["collectives"]
            assert all(begun[one] <= ended[one] + 1e-3 for one in begun)
    page = (folder / "report.html").read_text()
    assert f'"measured seconds":{found["seconds"]}' in page and '"measured":{"start"' in page


def test_a_block_in_which_nothing_ran_says_so_and_leaves_the_programs_as_they_were() -> None:
    model = Stack(2, 8)
    policy = Policy(lower="eager")
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="Make a step before"), sharded.profile() as early:
        sharded.step(x)  # compiles, and so is no step to measure
    assert str(early) == "nothing was measured"
    before = sharded._programs.newest.runner
    sharded(x)
    watched = torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True)  # or torch 2.12 warns
    with sharded.profile() as profile, watched as seen:
        assert sharded._programs.newest.runner is not before
        sharded.step(x)
        sharded(x)  # measured, and no step
    assert sharded._programs.newest.runner is before and len(profile.steps) == 1
    assert {one.key.partition(": ")[0] for one in seen.key_averages()} >= {"layers.0", "layers.1"}
    assert len(profile.runs) == 2 and profile.compiled is sharded._programs.newest
    with pytest.raises(ZeroDivisionError), sharded.profile():
        raise ZeroDivisionError  # its own error, not that nothing was measured
    assert sharded._programs.newest.runner is before


def test_what_bounds_a_step_is_the_largest_part_of_it() -> None:
    wanted = Policy(lower="eager", bucket_mb=0)
    model = Stack(3, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, plan = stages(model, optimizer, None, (torch.ones(2, 8),), wanted)
    program = found[-1]
    gather = next(node.name for node in program.graph.nodes if "gather" in node.name and node.op == "call_function")

    def step(wait: float, compute: float, wire: float, end: float = 1.0) -> Timeline:
        nodes = (
            Span("network", "u", 0.0, wire, gather), Span(WAIT, "u", 0.0, wait, gather),
            Span("compute", "u", wait, wait + compute, "x"), Span("compute", "u", end, end, "y"),
        )  # fmt: skip
        return Timeline(nodes, nodes)

    inductor = replace(plan, policy=replace(plan.policy, lower="inductor"))
    zero2 = replace(plan, policy=replace(plan.policy, shard="zero2"))
    nodes = replace(plan, shard=32, machine=replace(plan.machine, node=8))
    for where, given, bound, cure in (
        (plan, step(0.1, 0.8, 0.1), "compute (80%", 'lower="inductor"'),
        (inductor, step(0.1, 0.8, 0.1), "compute (80%", "no field of Policy"),
        (inductor, step(0.1, 0.2, 0.1), "the host", "a larger batch"),
        (plan, step(0.7, 0.2, 0.7), "waiting for gathers (70%", "Policy.prefetch"),
        (plan, step(0.7, 0.2, 0.9), "waiting for gathers (70%", 'shard="zero2"'),
        (zero2, step(0.7, 0.2, 0.9), "waiting for gathers (70%", "param_dtype=torch.bfloat16"),
        (nodes, step(0.7, 0.2, 0.9), "waiting for gathers (70%", "reshard_onto=8"),
    ):
        said = sentence(where, program, given)
        assert f"bound by {bound}" in said and cure in said, said


def test_a_collective_lasts_until_it_was_waited_for() -> None:
    found, _ = stages(Stack(3, 8), None, None, (torch.ones(2, 8),), Policy(lower="eager", bucket_mb=0), kind="gradient")
    nodes = [node for node in found[-1].graph.nodes if node.op == "call_function"]
    marks = [(node, 10.0 + place, 10.5 + place) for place, node in enumerate(nodes)]
    time = measured(marks, {node.name: node for node in nodes})
    waits = [span for span in time.nodes if span.lane == WAIT]
    wires = {span.node: span for span in time.nodes if span.lane == "network"}
    assert len(waits) == len(wires) == len(found[-1].collectives)
    place = {node.name: index for index, node in enumerate(nodes)}
    for wait in waits:
        assert wires[wait.node].end == wait.end and wires[wait.node].start == place[wait.node]
    assert time.nodes[0].start == 0.0
    assert time.busy_nodes("compute") == 0.5 * (len(nodes) - 2 * len(waits))
