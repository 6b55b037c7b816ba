"""Shards and optimizer state in host memory: each copy is next to its use, and no number is another one.

The program is the same on any device, so it is run on CPUs here, where a fetch is a copy that could as well be left
out; `compile_sharded` refuses that. That the copies go from and to a GPU is seen on fake tensors, and in the last
test, where there is one.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Plan, Policy, Program, compile_sharded
from fsdp_compiled.analysis.memory import persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import mutated, role_of
from fsdp_compiled.ir.program import Port
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.passes.host_offload import offload
from fsdp_compiled.plan.text import human
from fsdp_compiled.runtime.state import wait_for_host_memory
from tests import models, recipes, simulate
from tests.models import Block, Recipe
from tests.recipes import built
from tests.simulate import Simulation, uncompiled

CUDA = torch.device("cuda", 0)
PLAIN = Policy(lower="eager", bucket_mb=0)


def recipe(**how: Any) -> Recipe:
    policy = how.pop("policy", {})
    blocks = (Block("linear"), Block("linear"))
    return Recipe(blocks, **{"optimizer": "adamw", **how}, policy=replace(PLAIN, offload=True, **policy))


@functools.cache
def trained(what: Recipe, offloaded: bool, microbatches: int = 1, steps: int = 3, **how: Any) -> Simulation:
    policy = replace(what.policy, offload=offloaded)
    return recipes.trained(replace(what, policy=policy), steps, microbatches, **how)


def same(one: Simulation, other: Simulation) -> bool:
    """Bit for bit: losses, norms, and everything that the ranks hold."""
    assert [rank.values.keys() for rank in one.ranks] == [rank.values.keys() for rank in other.ranks]
    pairs = [*zip(one.losses, other.losses, strict=True), *zip(one.norms, other.norms, strict=True)]
    for mine, others in zip(one.ranks, other.ranks, strict=True):
        pairs += [(value, others.values[port]) for port, value in mine.values.items()]
    return all(torch.equal(left.nan_to_num(nan=1.5e30), right.nan_to_num(nan=1.5e30)) for left, right in pairs)


def host_inputs(program: Program) -> dict[Port, fx.Node]:
    """What lives in host memory."""
    return {
        port: node
        for port, node in program.inputs.items()
        if port.kind == "shard" or (port.kind == "state" and node.meta["val"].dim())
    }


# The program.

SHAPES = {
    "zero2": recipe(policy={"shard": "zero2"}),
    "limited": recipe(policy={"prefetch": 2, "limit": 3}),
    "several buffers gathered as one": recipe(groups="two"),
    "cast once it is there": recipe(policy={"precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
}
CASES = [(recipe(), kind) for kind in ("step", "gradient", "microbatch", "forward")]
CASES += [(what, "step") for what in SHAPES.values()]


@pytest.mark.parametrize(("what", "kind"), CASES, ids=["step", "gradient", "microbatch", "forward", *SHAPES])
def test_each_gather_and_each_update_fetches_and_what_was_written_goes_back(what: Recipe, kind: str) -> None:
    found, plan = built(what, kind)
    assert len(plan.units) == 3
    program, before = found[-1], found[[stage.history[-1] for stage in found].index("offload") - 1]
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    fetches, returns = program.marked("fetch"), program.marked("return")
    gathers = program.marked("gather")
    for gather in gathers:  # from the host, in front of the collective, with nothing else in between
        sources = [node.all_input_nodes[0] if role_of(node) == "cast" else node for node in gather.all_input_nodes]
        assert [role_of(source) for source in sources] == ["fetch"] * len(sources)
        assert min(order[source] for source in sources) == order[gather] - len({*sources, *gather.all_input_nodes})
        assert all(len(source.users) == 1 for source in sources)  # once a gather, and nothing stays
    read = sum(len(gather.all_input_nodes) for gather in gathers)
    changed = [port for port, node in host_inputs(before).items() if any(node in mutated(user) for user in node.users)]
    updated = [port for port in host_inputs(program) if port in changed]
    assert len(fetches) == read + len(updated)
    assert len(returns) == len(updated) == len({node.args[0] for node in returns})
    if kind == "step":
        trainable = [buffer for buffer in plan.buffers if buffer.updated]
        assert len(returns) == 3 * len(trainable)  # the shard and two moments
        update = [node for node in program.graph.nodes if node.meta.get("phase") == "update"]
        rows = [(node.meta["mark"].buffer, role_of(node)) for node in update if "mark" in node.meta]
        rows = [row for row in rows if row[0] and row[1] in ("fetch", "update", "return")]
        expected = [(buffer.key, role) for buffer in trainable for role in ("fetch", "update", "return")]
        assert [row for row, _ in groupby(rows)] == expected  # one buffer after the other
    else:
        assert not returns


def test_only_the_copies_cross_between_host_and_device() -> None:
    found, plan = built(recipe())
    on_gpu = replace(plan, device=CUDA)
    assert on_gpu.state_device.type == "cpu" and replace(on_gpu, policy=PLAIN).state_device == CUDA
    program = offload(found[[stage.history[-1] for stage in found].index("offload") - 1], on_gpu)
    assert {node.meta["val"].device.type for node in host_inputs(program).values()} == {"cpu"}
    for node in program.marked("fetch"):
        assert node.meta["val"].device == CUDA and node.kwargs["non_blocking"]
        assert node.meta["val"].shape == node.args[0].meta["val"].shape
    for node in program.marked("return"):
        target, source, non_blocking = node.args
        assert target.meta["val"].device.type == "cpu" and source.meta["val"].device == CUDA and non_blocking
    scalars = [port for port in program.inputs if port.kind == "state" and port not in host_inputs(program)]
    assert scalars and not any(role_of(user) == "fetch" for port in scalars for user in program.inputs[port].users)


def test_ranks_of_one_machine_have_the_same_program() -> None:
    found, plan = built(recipe())
    before = found[[stage.history[-1] for stage in found].index("offload") - 1]
    first, second = (offload(before, replace(plan, device=torch.device("cuda", index))) for index in (0, 1))
    assert first.text() == second.text() != found[-1].text() and "device(type='cuda')" in first.text()
    assert [node.kwargs["device"].index for node in second.marked("fetch")] == [1] * len(second.marked("fetch"))


def test_one_update_for_all_would_bring_everything_in_at_once() -> None:
    what = recipe(policy={"kernels": True})
    (kept, _), (offloaded, _) = built(replace(what, policy=replace(what.policy, offload=False))), built(what)

    def at_once(program: Program) -> int:
        return sum(str(node.target).startswith("fsdp_compiled.adam_") for node in program.graph.nodes)

    assert at_once(kept[-1]) == 1 and at_once(offloaded[-1]) == 0


def test_the_device_holds_less_and_the_summary_says_what_is_copied() -> None:
    what = recipe(policy={"prefetch": 0})
    rules = make_rules(models.build(what)[1])
    peaks, held = [], []
    for policy in (what.policy, replace(what.policy, offload=False)):
        found, plan = built(replace(what, policy=policy))
        held.append(persistent(plan, rules, program=found[-1]))
        peaks.append(predict(found[-1], plan, held[-1]).peak.nbytes)
    away, here = held
    assert away.parameters == 0 and here.host == 0
    assert away.host == here.parameters + (here.optimizer - away.optimizer) == 3 * here.parameters
    assert here.total - away.total == away.host
    assert peaks[1] - peaks[0] > 0.3 * away.host
    assert "in host memory" in str(away) and "in host memory" not in str(here)
    found, plan = built(what)
    size = plan.shard_numel(plan.buffers[0]) * 4
    text = str(found[-1])
    assert f"fetch: {human(size)} from the host" in text and f"return: {human(3 * size)} to the host" in text


# The numbers.


def without_a_return(program: Program, _: Plan) -> Program:
    edit = Edit(program)
    edit.graph.erase_node(edit.map[program.marked("return")[0]])
    return edit.done("schedule")


NUMBERS = {
    "zero3": recipe(),
    "zero2": recipe(policy={"shard": "zero2", "clip": 0.1, "recompute": "cheap"}),
    "one rank": recipe(policy={"recompute": "unit"}, shard=1),
    "overflows": recipe(policy={"loss_scale": 2.0**120, "prefetch": 1, "limit": 2}),  # and is put back
    "several buffers": recipe(groups="two"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_three_steps_are_bit_for_bit_those_without_copies(name: str) -> None:
    what = NUMBERS[name]
    expected, found = trained(what, False), trained(what, True)
    assert "offload" in found.program.history and "offload" not in expected.program.history
    assert same(found, expected)
    if name == "zero3":
        assert not same(trained(what, True, damage=without_a_return), expected)


def test_microbatches_cut_into_pieces_are_bit_for_bit_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(recipe(), False, microbatches=2, steps=2)
    monkeypatch.setattr(simulate, "lower", uncompiled)
    assert same(trained(recipe(), True, microbatches=2, steps=2), expected)


@settings(
    max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
)
@given(what=models.recipes(shards=("zero3", "zero2", "zero1")))
def test_whatever_the_model_no_number_changes(what: Recipe) -> None:
    assert same(trained(what, True, steps=1), trained(what, False, steps=1))


# Reading, and what is refused.


def test_the_host_waits_for_a_gpu_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    _, plan = built(recipe())
    for one in (plan, replace(plan, device=CUDA, policy=PLAIN)):
        wait_for_host_memory(one)
    assert waits == []
    wait_for_host_memory(replace(plan, device=CUDA))
    assert waits == [CUDA]


def test_on_a_cpu_it_is_refused_with_a_cure() -> None:
    model, optimizer = models.build(recipe())
    with pytest.raises(ValueError, match=re.escape("the model is on cpu: its shards are in host memory already.")):
        compile_sharded(model, optimizer, loss=models.loss, policy=Policy(offload=True))
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("given", "message"), [({"shard": "ddp"}, 'Give shard="zero3"'), ({"cuda_graph": True}, 'cuda_graph at "auto"')]
)
def test_what_makes_no_sense_with_it_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Policy(offload=True, **given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_the_same_and_shards_are_pinned() -> None:
    found = []
    for offloaded in (False, True):
        what = recipe(shard=1)
        model, optimizer = models.build(what)
        policy = replace(what.policy, offload=offloaded, kernels=False, cuda_graph=False)
        sharded = compile_sharded(model.cuda(), optimizer, loss=models.loss, policy=policy)
        losses = [sharded.step(*(one.cuda() for one in rows[0])).item() for rows in models.batches(what, 3)]
        state = sharded.state
        assert all(shard.is_pinned() == offloaded for shard in state.parameters.values())
        found.append((losses, sharded.full_state_dict(), {key: value.cpu() for key, value in state.optimizer.items()}))
    (losses, weights, moments), (other_losses, other_weights, other_moments) = found
    assert losses == other_losses
    assert all(torch.equal(weights[name], value) for name, value in other_weights.items())
    assert all(torch.equal(moments[name], value) for name, value in other_moments.items())
