"""Shards and optimizer state in host memory: each copy is next to its use, and no number is another one.

The program is the same on any device, so it is run on CPUs here, where a fetch is a copy that could as well be left
out; `compile_sharded` refuses that. That the copies go from and to a GPU is seen on fake tensors, and in the last
test, where there is one.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Plan, Policy, Program, RankError, Sharded, compile_sharded
from fsdp_compiled.analysis.memory import persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.ir.edit import Edit, moved
from fsdp_compiled.ir.nodes import HOST, mutated, role_of
from fsdp_compiled.ir.program import Port
from fsdp_compiled.kernels import host_copies
from fsdp_compiled.lower.capturable import obstacles
from fsdp_compiled.lower.cuda_graph import WARM, Replays
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.passes.host_memory import offload
from fsdp_compiled.plan.text import human
from fsdp_compiled.runtime import checked_call
from fsdp_compiled.runtime.state import wait_for_host_memory
from tests import models, recipes, simulate
from tests.allocator import record
from tests.feed_forward import ROWS, WIDTH, Model
from tests.graphs import compiled_with, stand_in
from tests.late_copies import Freed, late_copies
from tests.models import Block, Recipe
from tests.recipes import built
from tests.simulate import Simulation, before, uncompiled
from tests.standin import Plain, StandIn

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
    program, without = found[-1], found[before(found, "offload") - 1]
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    fetches, returns = program.marked("fetch"), program.marked("return")
    gathers = program.marked("gather")
    for gather in gathers:  # waits for the copies in front of the collective, with nothing else in between
        sources = [node.all_input_nodes[0] if role_of(node) == "cast" else node for node in gather.all_input_nodes]
        assert [role_of(source) for source in sources] == ["restored"] * len(sources)
        between = list(order)[min(order[source] for source in sources) : order[gather]]
        assert {role_of(node) for node in between} <= {"restored", "cast", "fetch"}
        assert all(len(source.users) == 1 for source in sources)  # once a gather, and nothing stays
    read = sum(len(gather.all_input_nodes) for gather in gathers)
    changed = [port for port, node in host_inputs(without).items() if any(node in mutated(user) for user in node.users)]
    updated = [port for port in host_inputs(program) if port in changed]
    assert len(fetches) == read + len(updated)
    assert len(returns) == len(updated) == len({node.args[0] for node in returns})
    if kind == "step":
        trainable = [buffer.key for buffer in plan.buffers if buffer.updated]
        assert len(returns) == 3 * len(trainable)  # the shard and two moments
        rows = [(node.meta["mark"].buffer, role_of(node)) for node in order if node.meta.get("phase") == "update"
                if "mark" in node.meta]  # fmt: skip
        rows = [row for row in rows if row[0] and row[1] in ("update", *HOST)]
        assert [row for row, _ in groupby(rows)] == in_turn(trainable)
    else:
        assert not returns


def in_turn(keys: list[str]) -> list[tuple[str, str]]:
    """The update, buffer after buffer: what arrives and what leaves while one is updated."""
    found = [(keys[0], "fetch")]
    for place, key in enumerate(keys):
        found += [(key, "restored"), *((later, "fetch") for later in keys[place + 1 : place + 2]), (key, "update")]
        found += [*((sooner, "stored") for sooner in keys[max(place - 1, 0) : place]), (key, "return")]
    return [*found, (keys[-1], "stored")]


@pytest.mark.parametrize(("what", "kind"), CASES, ids=["step", "gradient", "microbatch", "forward", *SHAPES])
def test_a_copy_starts_where_the_one_before_it_has_arrived(what: Recipe, kind: str) -> None:
    program = built(what, kind)[0][-1]
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    begins = {node.meta["phase"]: node for node in reversed(nodes)}
    rows = [list(row) for fetches, row in groupby(nodes, key=lambda node: role_of(node) == "fetch") if fetches]
    for place, row in enumerate(rows):
        if row[0] is not begins[row[0].meta["phase"]]:
            assert {*row[0].prev.all_input_nodes} & {*rows[place - 1]}
        waits = [user for fetch in row for user in fetch.users]
        assert [role_of(wait) for wait in waits] == ["restored"] * len(row)
        between = nodes[nodes.index(row[-1]) + 1 : nodes.index(waits[0])]
        first_of_phase = row[0] is begins[row[0].meta["phase"]]
        assert first_of_phase or any(role_of(node) not in HOST for node in between)  # what it travels beside
    assert len(rows) >= len(program.marked("gather"))


def test_only_the_copies_cross_between_host_and_device() -> None:
    found, plan = built(recipe())
    on_gpu = replace(plan, device=CUDA)
    assert on_gpu.state_device.type == "cpu" and replace(on_gpu, policy=PLAIN).state_device == CUDA
    program = offload(moved(found[before(found, "offload") - 1], CUDA), on_gpu)
    assert {node.meta["val"].device.type for node in host_inputs(program).values()} == {"cpu"}
    for node in program.marked("fetch"):
        assert node.meta["val"].device == CUDA and node.meta["val"].shape == node.args[0].meta["val"].shape
    for node in program.marked("return"):
        target, source = node.args
        assert target.meta["val"].device.type == "cpu" and source.meta["val"].device == CUDA
    scalars = [port for port in program.inputs if port.kind == "state" and port not in host_inputs(program)]
    assert scalars and not any(role_of(user) == "fetch" for port in scalars for user in program.inputs[port].users)
    assert obstacles(program, CUDA, {"shard": "nccl"}, {"nccl"}) == []  # to a graph
    for node in program.marked("return"):
        del node.meta["mark"]
    assert "made on the CPU" in obstacles(program, CUDA, {"shard": "nccl"}, {"nccl"})[0]


def test_ranks_of_one_machine_have_the_same_program() -> None:
    found, plan = built(recipe())
    stage = found[before(found, "offload") - 1]
    first, second = (offload(stage, replace(plan, device=torch.device("cuda", index))) for index in (0, 1))
    assert first.text() == second.text() != found[-1].text() and "device(type='cuda')" in first.text()
    assert [node.args[1].index for node in second.marked("fetch")] == [1] * len(second.marked("fetch"))


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
    sent = edit.map[program.marked("return")[0]]
    for wait in [*sent.users]:
        edit.graph.erase_node(wait)
    edit.graph.erase_node(sent)
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


# Beside compute, as on a GPU: each copy is made as late as it may be.


def test_copies_that_end_as_late_as_they_may_change_nothing() -> None:
    for name in ("zero3", "several buffers"):
        with late_copies() as streams:
            found = recipes.trained(NUMBERS[name], 2)
        assert same(found, recipes.trained(replace(NUMBERS[name], policy=PLAIN), 2))
        copies = [len(found.program.marked(role)) for role in ("fetch", "return")]
        assert sorted(len(stream.row) for stream in streams) == sorted(2 * 2 * count for count in copies)
        assert min(copies) > 0 and not any(any(stream.row) for stream in streams)  # each ran, on both ranks


@pytest.mark.parametrize("broken", ["a wait is left out", "a value is written while it leaves"])
def test_a_copy_that_is_late_is_seen(broken: str) -> None:
    """The controls: the numbers are others, or memory is read that was freed."""

    def damage(program: Program, _: Plan) -> Program:
        edit = Edit(program)
        if broken == "a wait is left out":
            wait = edit.map[program.marked("restored")[0]]
            wait.replace_all_uses_with(wait.args[0])
            edit.graph.erase_node(wait)
        else:
            for sent in [edit.map[one] for one in program.marked("return")]:
                with edit.at(sent.next, "update"):
                    edit.call(torch.ops.aten.zero_.default, sent.args[1])
        return replace(edit.done("by hand"), history=())

    with late_copies(), contextlib.suppress(Freed):
        assert not same(recipes.trained(NUMBERS["zero3"], 2, damage=damage), trained(NUMBERS["zero3"], False, steps=2))


@contextlib.contextmanager
def on_a_cpu(**policy: Any) -> Iterator[Callable[..., Sharded]]:
    """Inside, nobody refuses what a CPU gains nothing by."""

    def made(replays: Replays | None = None, **more: Any) -> Sharded:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        chosen = Policy(**{"lower": "eager", "offload": True, "dynamic": False, "kernels": False} | policy | more)
        return compiled_with(replays or Replays(None, False), model, optimizer, policy=chosen)

    with mock.patch.object(checked_call, "check_device", lambda *_: None):
        yield made


def train(sharded: Sharded, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = [sharded.step(torch.randn(ROWS, WIDTH)).clone() for _ in range(steps)]
    return [*losses, *sharded.full_state_dict().values()]


def eager(steps: int = 3) -> list[torch.Tensor]:
    """The same of PyTorch alone."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model(torch.randn(ROWS, WIDTH)))
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses] + list(model.state_dict().values())


def test_steps_are_those_of_eager_pytorch_and_the_peak_is_as_predicted() -> None:
    with on_a_cpu() as made, late_copies():
        sharded = made()
        assert all(map(torch.equal, train(sharded), eager()))
        batch = torch.randn(ROWS, WIDTH)
        with record() as recording:
            sharded.step(batch)
    memory = sharded.memory
    assert recording.peak + memory.persistent.total + memory.batch == pytest.approx(memory.peak.nbytes, rel=0.01)


@pytest.mark.parametrize("role", ["restored", "stored"])
def test_a_step_that_breaks_off_leaves_no_copy_under_way(role: str) -> None:
    """In forward, and it can be made again; in the update, and each tensor is as before the step or as after it."""
    found = []
    for breaks in (False, True):
        with on_a_cpu() as made, late_copies() as streams:
            sharded = made()
            torch.manual_seed(1)
            sharded.step(batch := torch.randn(ROWS, WIDTH))
            held = [*sharded.state.parameters.values(), *sharded.state.optimizer.values()]
            states = [[value.clone() for value in held]]
            if breaks:
                waits = [node for node in sharded.program.graph.nodes if role_of(node) in ("restored", "stored")]
                where = iter(node is sharded.program.marked(role)[role == "stored"] for node in waits)  # type: ignore[arg-type]
                wait = host_copies.Lane.wait

                def broken(*given: Any, wait: Any = wait, where: Iterator[bool] = where) -> None:
                    if next(where):
                        raise ArithmeticError("broken")
                    wait(*given)

                raises = pytest.raises(ArithmeticError, match=r"^broken$")
                with mock.patch.object(host_copies.Lane, "wait", broken), torch.random.fork_rng(devices=()), raises:
                    sharded.step(batch)
                assert not any(any(stream.row) for stream in streams)
            if not breaks or role == "restored":
                assert all(map(torch.equal, held, states[0]))
                sharded.step(batch)
            found.append([*states, [value.clone() for value in held]])
    (before_it, whole), (_, after) = found
    if role == "restored":
        assert all(map(torch.equal, whole, after))
    else:
        either = [
            (torch.equal(one, left), torch.equal(one, right)) for one, left, right in zip(after, before_it, whole)
        ]
        assert all(old or new for old, new in either) and any(new and not old for old, new in either)
        with pytest.raises(RankError, match="may be half updated"):
            sharded.step(batch)


def test_a_graph_holds_the_copies() -> None:
    with on_a_cpu() as made:
        graphed, plain = made(Replays(StandIn(), "auto"), cuda_graph="auto"), made(Plain(), cuda_graph="auto")
        assert all(map(torch.equal, train(graphed, 6), train(plain, 6)))
    assert graphed.replays == 6 - WARM
    operators = [re.split(r"::|\.", name)[1] for name in stand_in(graphed).graphs[0].operators if "stor" in name]
    for role, name in (("fetch", "restore"), ("return", "store_"), ("restored", "restored"), ("stored", "stored")):
        assert operators.count(name) == len(graphed.program.marked(role)) > 5


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
    ("given", "message"), [({"shard": "ddp"}, 'Give shard="zero3"'), ({"copies": True}, 'copies at "auto"')]
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
