"""Local steps beside a loop that a person would write: an optimizer in each site, and an outer one over the sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import OuterSGD, Policy, compile_sharded, passes, simulate
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.nodes import is_collective, is_wait, mutated
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.runtime.local_steps import halves, programs_of
from tests.chosen import chosen, selected
from tests.launch import launch
from tests.workers.local_steps import FOUR, TWO, Net, loss_of

WORKER = Path(__file__).parents[1] / "workers" / "local_steps.py"
# What these show is in another of the cases too: late parts are parts, of a heavy ball, zero1 and zero2 lay shards out
# as zero3 does, and microbatches are on a mesh.
REPEATED = (
    "each rank, a mesh", "means", "heavy ball", "late", "parts", "inductor, late", "zero3", "zero2", "zero1",
)  # fmt: skip


def kept(cases: Any) -> list[Any]:
    return chosen(cases, [case for case in cases if case not in REPEATED])


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(WORKER, 2, *selected(request, "case", "two"))


@pytest.mark.parametrize("case", kept(TWO))
def test_sites_are_those_of_a_loop_written_by_hand(two: list[dict[str, Any]], case: str) -> None:
    """Bit for bit, but where gradients' norms or kernels sum in another order."""
    bound = 1e-6 if "clipping" in case or "inductor" in case else 0.0
    for found in (one[case] for one in two):
        mine, expected = found["losses"]
        assert mine == pytest.approx(expected, rel=bound, abs=bound)
        assert max(found["weights"], found["buffers"]) <= bound and found["alike"]
        assert min(found["alone"], found["other rate"]) > 1e-3  # without an exchange, or another outer rate


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(WORKER, 4, *selected(request, "case", "four"), timeout=300)


@pytest.mark.parametrize("case", kept(FOUR))
def test_so_are_two_sites_of_two_ranks(four: list[dict[str, Any]], case: str) -> None:
    test_sites_are_those_of_a_loop_written_by_hand(four, case)


@pytest.mark.parametrize(("ranks", "late"), [("two", "1"), ("four", "0")])
def test_exchanges_are_sent_in_a_byte_an_element(ranks: str, late: str, request: pytest.FixtureRequest) -> None:
    """Sites stay alike, and near those that send all of it."""
    for found in (one["int8"][late] for one in request.getfixturevalue(ranks)):
        assert found["alike"] and 1e-6 < found["weights"] < found["alone"] / 5


def test_runs_that_were_cut_anywhere_go_on_bit_for_bit(two: list[dict[str, Any]]) -> None:
    for found in (one["resumed"] for one in two):
        assert found["bit for bit"] == {"2": True, "3": True, "4": True} and not found["control"]
        assert len(found["late, int8"]) == 4 and all(found["late, int8"].values())
        assert "it is of local steps (Policy.sync_every) of 2 sites of 1 ranks" in found["elsewhere"]
        assert found["from none"] == [0, True]
    assert two[0]["resumed"]["anchor"]


def test_between_exchanges_weights_are_the_site_s_and_are_not_given_away(two: list[dict[str, Any]]) -> None:
    for found in (one["between"] for one in two):
        for call in ("full_state_dict", "export"):
            assert f"{call} between exchanges" in found[call] and "sharded.synchronize()" in found[call]
        optimizer = ("full_optimizer_state_dict", "load_full_optimizer_state_dict")
        for call in ("state_dict", "load_state_dict", *optimizer, "apply"):
            assert f"{call} under Policy.sync_every" in found[call]
        assert found["gathered"] and found["sites differ"] and all(found["anchor"].values())


def test_ranks_that_disagree_are_told(two: list[dict[str, Any]]) -> None:
    for found in (one["disagreeing"] for one in two):
        assert "sync_every=4" in found["every"] and "sync_every=3" in found["every"]
        assert "0.lr = 0.1" in found["rates"] and "0.lr = 0.2" in found["rates"]
        assert "exchange after 1 local steps" in found["other number"]
    assert "exchange after 1 local steps" in two[0]["disagreeing"]["other call"]


def test_one_process_has_no_collective_and_an_exchange_of_its_own() -> None:
    model = Net()
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=loss_of, policy=Policy(lower="eager", sync_every=2)
    )
    sharded.step(torch.randn(4, 8), torch.randn(4, 3))
    assert not any(is_collective(node) for node in sharded.program.graph.nodes)
    assert sharded.outer_program.history == ("outer_update",)
    assert {port.kind for port in sharded.outer_program.inputs} == {"shard", "state"}


def test_an_exchange_that_travels_is_cut_behind_what_is_sent() -> None:
    """The second half of each part begins where the first one's collectives are awaited, and writes alone."""
    leaves = [Leaf((f"layers.{n}",), (36,), (1,), torch.float32, True, 0, f"layers.{n}") for n in range(4)]
    policy = Policy("ddp", sync_every=8, outer=OuterSGD(parts=2, overlap=3), bucket_mb=0)
    plan = make_plan(leaves, policy, torch.device("cpu"), 1, 2, 1)
    assert [step for step, _ in plan.exchanged] == [4, 8] and [len(part) for _, part in plan.exchanged] == [2, 2]
    for _, buffers in plan.exchanged:
        program = passes.outer(plan, buffers, late=True)
        sent, arrived = halves(program)
        assert [is_collective(node) for node in sent.graph.nodes].count(True) == len(buffers)
        assert not any(is_wait(node) or mutated(node) for node in sent.graph.nodes)
        assert not any(is_collective(node) for node in arrived.graph.nodes)
        assert {port.kind for port in arrived.inputs} == {"shard", "state", "saved"} and not arrived.outputs
        assert sum(bool(mutated(node)) for node in arrived.graph.nodes) == 3 * len(buffers)


@pytest.mark.parametrize("outer", [None, OuterSGD(1.0, 0.0, nesterov=False)])
def test_what_is_kept_for_an_exchange_is_in_the_predicted_memory(outer: OuterSGD | None) -> None:
    found = []
    for fields in ({}, {"sync_every": 2, "outer": outer}):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        sharded = compile_sharded(model, optimizer, loss=loss_of, policy=Policy(lower="eager", **fields))
        sharded.step(torch.randn(4, 8), torch.randn(4, 3))
        found.append(sharded.memory.persistent.optimizer)
        held = sum(one.nbytes for one in sharded.state.optimizer.values())
        assert found[-1] == held
    assert found[1] > found[0]


def test_local_steps_are_not_simulated() -> None:
    with pytest.raises(ValueError, match="local steps are not simulated yet"):
        simulate(Net, loss_of, (torch.zeros(4, 8), torch.zeros(4, 3)), 2, "gpu", Policy(sync_every=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync_every": 0}, "Policy.sync_every is 0"),
        ({"outer": OuterSGD()}, "which is None"),
        ({"sync_every": 2, "outer": 0.7}, "expected an OuterSGD"),
        ({"sync_every": 2, "outer": OuterSGD(parts=3)}, "as many parts as steps"),
        ({"sync_every": 2, "outer": OuterSGD(overlap=2)}, "an overlap of fewer steps"),
        ({"sync_every": 2, "loss_scale": "dynamic"}, "Policy.loss_scale"),
        ({"sync_every": 2, "weigh": "rows"}, "Policy.weigh"),
        ({"sync_every": 2, "offload": True}, "Policy.offload"),
    ],
)
def test_what_does_not_go_with_local_steps_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


def test_numbers_of_the_outer_optimizer_are_checked() -> None:
    for fields in ({"lr": 0.0}, {"momentum": 1.0}, {"momentum": 0.0}, {"nesterov": 1}, {"parts": 0}, {"overlap": -1}):
        with pytest.raises(ValueError, match="OuterSGD"):
            OuterSGD(**fields)  # type: ignore[arg-type]


def test_what_the_wire_cannot_send_is_refused_before_anything_is_changed() -> None:
    plan = make_plan(
        [Leaf(("weight",), (36,), (1,), torch.float64, True, 0, "root")],
        Policy("ddp", sync_every=2, wire="int8"), torch.device("cpu"), 1, 1, 1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"is sent in torch\.float64"):
        programs_of(plan, Mesh(torch.device("cpu"), 1, 2))


def test_whole_matrices_are_refused() -> None:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="whole matrices"):
        compile_sharded(model, torch.optim.Muon(model.parameters()), loss=loss_of, policy=Policy(sync_every=2))
