"""Saved values wait in host memory under a budget: the same bits, few copies under way, the predicted peak.

A CPU has no other memory. NumPy's stands for it: PyTorch's allocator does not count it, so that what it does count is
what a device would hold. Copies beside compute, as on a GPU, are run on a stand-in that makes them as late as it may.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled import Plan, Policy, Program, Sharded, compile_sharded
from fsdp_compiled.analysis.memory import Persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.analysis.saved_values import AHEAD
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.form import ProgramError
from fsdp_compiled.ir.nodes import fake_tensor, positions, role_of
from fsdp_compiled.ir.program import Port
from fsdp_compiled.kernels import host_copies
from fsdp_compiled.lower import trials
from fsdp_compiled.lower.capturable import obstacles
from fsdp_compiled.lower.cuda_graph import WARM, Replays
from fsdp_compiled.passes import SCHEDULING, run, store_saved
from fsdp_compiled.passes.check import check
from fsdp_compiled.plan.hardware import GPU
from fsdp_compiled.runtime.programs import compile as making
from fsdp_compiled.runtime.programs.memory_budget import GIB
from tests import simulate
from tests.allocator import record
from tests.feed_forward import ROWS, WIDTH, Model
from tests.graphs import compiled_with, stand_in
from tests.late_copies import late_copies
from tests.simulate import Simulation, before, stages, uncompiled
from tests.standin import Plain, StandIn

STEPS = 3


def room(value: torch.Tensor, pinned: bool) -> torch.Tensor:
    assert not pinned
    memory = numpy.full(value.numel(), 9, dtype=str(value.dtype)[6:])
    return torch.from_numpy(memory).as_strided(value.size(), value.stride())


@contextmanager
def host_memory() -> Iterator[None]:
    """Inside, there is other memory than the device's."""
    with (
        mock.patch.object(making, "has_host_memory", lambda job: True),
        mock.patch.object(host_copies, "make_room", room),
    ):
        yield


def made(memory_gb: float | None, replays: Replays | None = None, **policy: Any) -> Sharded:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen = Policy(lower="eager", memory_gb=memory_gb, dynamic=False, **{"recompute": None, **policy})
    return compiled_with(replays or Replays(None, False), model, optimizer, policy=chosen)


def train(sharded: Sharded, steps: int = STEPS) -> list[torch.Tensor]:
    """Losses and weights."""
    torch.manual_seed(1)
    losses = [sharded.step(torch.randn(ROWS, WIDTH)) for _ in range(steps)]
    return [*losses, *sharded.full_state_dict().values()]


@functools.cache
def free() -> tuple[list[torch.Tensor], int]:
    """Numbers and predicted peak without a budget."""
    sharded = made(None)
    return train(sharded), sharded.memory.peak.nbytes


def budget(part: float) -> float:
    return part * free()[1] / GIB


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# The choice, the numbers and the peak.


@pytest.mark.parametrize("part", [0.85, 0.6])
def test_a_budget_is_kept_in_host_memory_with_the_same_bits(part: float) -> None:
    with host_memory():
        sharded = made(budget(part))
        assert equal(train(sharded), free()[0])
        batch = torch.randn(ROWS, WIDTH)
        with record() as recording:
            sharded.step(batch)
    memory = sharded.memory
    seen = recording.peak + memory.persistent.total + memory.batch
    assert seen == pytest.approx(memory.peak.nbytes, rel=0.01) and seen <= part * free()[1]
    rooms = [node.meta["val"].nbytes for port, node in sharded.program.inputs.items() if port.kind == "room"]
    assert rooms and memory.persistent.host == sum(rooms)
    said = f"{len(rooms)} of 21 saved values, .*, in host memory meanwhile at some .* ms: the first that fits"
    assert re.search(said, " ".join(sharded.program.notes))
    text = str(sharded.program)
    assert "store: 256.0 KiB to the host" in text and "from the host" in text and "wait for gelu_store" in text


def test_each_value_goes_the_cheaper_way() -> None:
    with host_memory():
        sharded = made(budget(0.5), recompute="auto")
        assert equal(train(sharded), free()[0])
    note = " ".join(sharded.program.notes)
    assert "made again in backward" in note and "in host memory meanwhile" in note
    stored = {port.name for port in sharded.program.inputs if port.kind == "room"}
    assert any("addmm" in name for name in stored)  # products are dear
    assert not any("gelu" in name for name in stored)


def test_a_cpu_has_no_other_memory_and_what_backward_is_not_there_for_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        sharded = made(budget(0.6))
        sharded.step(torch.randn(ROWS, WIDTH))
    assert "nothing fits" in caplog.text and not any(port.kind == "room" for port in sharded.program.inputs)


# The program.


def captured(**policy: Any) -> tuple[Program, Plan]:
    """Before what is scheduled, on two ranks."""
    chosen = Policy(lower="eager", bucket_mb=0, recompute=None, **policy)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, plan = stages(model, optimizer, None, (torch.ones(ROWS, WIDTH),), chosen)
    return found[before(found, "limit") - 1], plan


def all_stored(program: Program, plan: Plan) -> Program:
    """With all values in host memory that may be."""
    return store_saved({node.name for node in program.graph.nodes})(program, plan)


def test_copies_stand_behind_the_last_use_and_few_are_under_way() -> None:
    before, plan = captured()
    program = run(before, plan, (all_stored, *SCHEDULING))
    order = positions(program.graph)
    sent, back = program.marked("store"), program.marked("restore")
    assert len(sent) == len(back) > 10
    for role, ended in (("store", "stored"), ("restore", "restored")):
        under_way, most = 0, 0
        for node in order:
            under_way += (role_of(node) == role) - (role_of(node) == ended)
            most = max(most, under_way)
        assert under_way == 0 and most == AHEAD
    for store in sent:
        value = store.args[1]
        uses = [user for user in value.users if role_of(user) not in ("store", "stored")]
        views = [user for use in uses if use.target is torch.ops.aten.t.default for user in use.users]
        assert all(node.meta["phase"] == "forward" for node in [*uses, *views])
        assert max(order[node] for node in [value, *uses, *views]) < order[store]
        between = list(order)[max(order[node] for node in [value, *uses, *views]) + 1 : order[store]]
        assert all(role_of(node) is not None for node in between)  # copies and gathers
    assert not any(user.meta["phase"] != "forward" for one in sent for user in one.args[1].users)


Damage = Callable[[Edit, fx.Node], None]


def late_wait(edit: Edit, stored: fx.Node) -> None:
    edit.move([stored], before=next(node for node in edit.graph.nodes if role_of(node) == "restore"))


def used_later(edit: Edit, stored: fx.Node) -> None:
    use = next(node for node in reversed(edit.graph.nodes) if node.meta.get("phase") == "backward")
    with edit.at(use, "backward"):
        edit.call(torch.ops.aten.neg.default, stored.args[1]).meta["effect"] = True


def room_read(edit: Edit, stored: fx.Node) -> None:
    with edit.at(stored, "forward"):
        edit.call(torch.ops.aten.neg.default, stored.args[0].args[0]).meta["effect"] = True


def not_awaited(edit: Edit, stored: fx.Node) -> None:
    node = next(node for node in edit.graph.nodes if role_of(node) == "restored")
    node.replace_all_uses_with(node.args[0])


DAMAGE: dict[str, tuple[Damage, str]] = {
    "waited for late": (late_wait, "3 copies are under way, 2 at most may be"),
    "read after it went": (used_later, "which is in host memory by then"),
    "a room that is read": (room_read, "which a copy of forward's is to fill"),
    "not waited for": (not_awaited, "is waited for 0 times"),
}


@pytest.fixture(scope="module")
def stored_program() -> tuple[Program, Plan]:
    before, plan = captured()
    return run(before, plan, (all_stored,)), plan


@pytest.mark.parametrize("name", DAMAGE)
def test_a_broken_program_is_refused(name: str, stored_program: tuple[Program, Plan]) -> None:
    program, plan = stored_program
    damage, message = DAMAGE[name]
    edit = Edit(program)
    damage(edit, next(node for node in edit.graph.nodes if role_of(node) == "stored"))
    with pytest.raises(ProgramError, match=message):
        check(edit.done("by hand"), plan)


@pytest.mark.parametrize("pieces", [False, True])
def test_on_two_ranks_numbers_are_bit_for_bit_the_same(pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All values that can be, under gathers, as calls and as pieces."""
    if pieces:
        monkeypatch.setattr(simulate, "lower", uncompiled)

    def trained(stored: bool) -> Simulation:
        torch.manual_seed(0)
        model = Model()
        batches = [tuple((torch.randn(ROWS, WIDTH),) for _ in range(2)) for _ in range(2)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Policy(lower="eager", bucket_mb=0, recompute=None)
        return simulate.simulate(model, optimizer, None, batches, policy, damage=all_stored if stored else None)

    expected, found = trained(False), trained(True)
    assert len(found.program.marked("store")) > 10
    assert equal(found.losses, expected.losses)
    assert equal(list(found.parameters.values()), list(expected.parameters.values()))


# Beside compute, as on a GPU.


def test_copies_that_end_as_late_as_they_may_change_nothing() -> None:
    with host_memory(), late_copies() as streams:
        sharded = made(budget(0.6))
        assert equal(train(sharded), free()[0])
    for stream, role in zip(streams, ("store", "restore"), strict=True):  # one each way
        copies = len(host_copies.SIZES) + STEPS * len(sharded.program.marked(role))
        assert len(stream.row) == copies and not any(stream.row)  # each ran


def broken_off(sharded: Sharded, batch: torch.Tensor) -> None:
    """A step that ends in an error where it waits for the third value that comes back."""
    wait, waits = host_copies.Lane.wait, iter(range(1000))
    third = len(sharded.program.marked("stored")) + 2

    def breaks(*given: Any) -> None:
        if next(waits) == third:
            raise ArithmeticError("broken")
        wait(*given)

    broken = pytest.raises(ArithmeticError, match=r"^broken$")
    with torch.random.fork_rng(devices=()), mock.patch.object(host_copies.Lane, "wait", breaks), broken:
        sharded.step(batch)


def test_a_step_that_breaks_off_leaves_no_copy_under_way_and_can_be_made_again() -> None:
    found = []
    for breaks in (False, True):
        with host_memory(), late_copies() as streams:
            sharded = made(budget(0.6))
            torch.manual_seed(1)
            batches = [torch.randn(ROWS, WIDTH) for _ in range(STEPS)]
            losses = [sharded.step(batches[0])]
            before = [value.clone() for value in sharded.state.parameters.values()]
            if breaks:
                broken_off(sharded, batches[1])
            assert not any(any(one.row) for one in streams) and equal(before, list(sharded.state.parameters.values()))
            losses += [sharded.step(batch) for batch in batches[1:]]
            found.append([*losses, *sharded.full_state_dict().values()])
    assert equal(*found)


def test_without_the_waits_numbers_are_others() -> None:
    untried = mock.patch.object(trials, "_copies_failure", mock.Mock(return_value=""))
    with host_memory(), untried, late_copies(), mock.patch.object(host_copies.Lane, "wait", lambda *_: None):
        assert not equal(train(made(budget(0.6))), free()[0])


def test_copies_that_a_trial_finds_wrong_are_made_where_they_start(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    with host_memory(), late_copies() as streams, mock.patch.object(host_copies.Lane, "wait", lambda *_: None):
        with caplog.at_level(logging.WARNING, "fsdp_compiled"):
            assert "came back as another" in host_copies.failure(cpu)
            sharded = made(budget(0.6))
            assert equal(train(sharded), free()[0])
        assert {"cpu"} == host_copies.IN_ORDER and len(streams) == 2  # the trial's
    assert caplog.text.count("the kernel of store_ is not used") == 1
    with late_copies():
        assert host_copies.failure(cpu) == ""


def test_a_graph_holds_the_copies_and_their_rooms() -> None:
    with host_memory():
        graphed = made(budget(0.6), Replays(StandIn(), "auto"), cuda_graph="auto")
        plain = made(budget(0.6), Plain(), cuda_graph="auto")
        assert equal(train(graphed, 10), train(plain, 10))
    assert graphed.replays == 10 - WARM
    operators = stand_in(graphed).graphs[0].operators
    assert sum("store_" in name for name in operators) == len(graphed.program.marked("store")) > 5


def test_on_a_gpu_only_copies_cross_and_they_are_no_obstacle_to_a_graph() -> None:
    """With fake tensors of one."""
    before, plan = captured()
    edit, gpu = Edit(before), torch.device("cuda", 0)
    move = lambda one: fake_tensor(edit.mode, tuple(one.shape), one.stride(), one.dtype, gpu)  # noqa: E731
    for node in edit.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, move, node.meta["val"])
    plan = replace(plan, device=gpu, machine=GPU)
    whole = run(replace(edit.done("by hand"), history=before.history), plan, SCHEDULING)
    program = run(replace(edit.done("by hand"), history=before.history), plan, (all_stored, *SCHEDULING))
    on_host = {node for node in program.graph.nodes if node.op != "output" and _devices(node) == {"cpu"}}
    inputs = [program.inputs[port] for port in rooms(program.inputs)]
    assert inputs and on_host == {*inputs, *program.marked("store"), *program.marked("stored")}
    for node in program.graph.nodes:
        read = set().union(*map(_devices, node.all_input_nodes))
        assert len(read) <= 1 or role_of(node) in ("store", "stored", "restored")
    assert all(node.meta["val"].device == gpu for node in program.marked("restore"))
    peaks = [predict(one, plan, Persistent()).peak.nbytes for one in (whole, program)]
    assert peaks[1] < 0.6 * peaks[0]
    assert obstacles(program, gpu, {"shard": "nccl"}, {"nccl"}) == []
    for node in program.marked("stored"):
        del node.meta["mark"]
    assert "made on the CPU" in obstacles(program, gpu, {"shard": "nccl"}, {"nccl"})[0]


def _devices(node: fx.Node) -> set[str]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def rooms(ports: Iterable[Port]) -> list[Port]:
    return [port for port in ports if port.kind == "room"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_numbers_are_the_same_and_memory_is_less() -> None:
    found, batches = [], [torch.randn(64 * ROWS, WIDTH, device="cuda") for _ in range(6)]
    for part in (None, 0.7):
        torch.manual_seed(0)
        model = Model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Policy(lower="eager", recompute=None, memory_gb=part and part * found[0][1] / GIB, kernels=False)
        sharded = compile_sharded(model, optimizer, policy=policy)
        losses = [sharded.step(batch) for batch in batches]
        found.append(([*losses, *sharded.full_state_dict().values()], sharded.memory.peak.nbytes))
        assert bool(rooms(sharded.program.inputs)) == (part is not None) and sharded.replays > 0
    assert equal(found[0][0], found[1][0])
