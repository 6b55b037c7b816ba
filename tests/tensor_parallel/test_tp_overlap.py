"""Collectives along tp in the program, the order, the timeline, memory and `simulate`; nothing of it needs ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from fsdp_compiled import Policy, compile_sharded, fully_shard, passes, simulate
from fsdp_compiled.analysis.roofline import flops
from fsdp_compiled.analysis.timeline import estimate
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.nodes import is_collective, is_view, is_wait, positions, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.hardware import Cluster
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.simulate import Estimate
from fsdp_compiled.runtime.tensor_parallel.parts import check_policy
from tests.cut_models import GPT, batch, cut, loss_fn

MACHINE = Cluster(flops=3e9, memory=8e9, network=2e7, latency=1e-5, inner=1e8, node=2)  # 1e7 a rank
CPU = torch.device("cpu")
LAYOUT = (getitem, torch.ops.aten.cat.default, torch.ops.aten.split.Tensor)


def of_gpt(depth: int = 1, sequence: bool = True) -> Estimate:
    def parts(model: Any, tp: Any) -> None:
        cut(model, tp, sequence=sequence)

    policy = Policy(lower="eager", bucket_mb=0)
    return simulate(
        lambda: GPT(depth=depth), loss_fn, batch(0, 0), {"shard": 2, "tp": 2}, MACHINE, policy, cut=parts,
        units="layers.*",
    )  # fmt: skip


@pytest.fixture(scope="module")
def gpt() -> Estimate:
    return of_gpt()


class Visits:
    """How many nodes of a graph are looked at in a row; what a pass asks of a node's neighbours is not counted."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, call: Callable[[], Any]) -> Any:
        nodes, steps = fx.Graph.nodes, {"next": fx.Node.next, "prev": fx.Node.prev}

        def all_nodes(graph: fx.Graph) -> Any:
            self.count += len(nodes.fget(graph))  # type: ignore[attr-defined]
            return nodes.fget(graph)  # type: ignore[attr-defined]

        def step(node: fx.Node, name: str) -> Any:
            self.count += 1
            return steps[name].fget(node)  # type: ignore[attr-defined]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fx.Graph, "nodes", property(all_nodes))
            for name in steps:
                patch.setattr(fx.Node, name, property(partial(step, name=name)))
            return call()


@pytest.fixture(scope="module")
def visited() -> dict[int, int]:
    """By the number of a program's nodes, how many the pass looks at."""
    return {}


@pytest.fixture(scope="module")
def deeper(visited: dict[int, int]) -> Estimate:
    def counted(program: Program, plan: Plan) -> Program:
        visits = Visits()
        done = visits.of(lambda: passes.overlap(program, plan))
        visited[len(program.graph.nodes)] = visits.count
        return done

    with pytest.MonkeyPatch.context() as patch:
        rest = tuple(counted if one is passes.overlap else one for one in passes.DIFFERENTIATION)
        patch.setattr(passes, "DIFFERENTIATION", rest)
        return of_gpt(2)


def test_the_pass_looks_at_each_node_a_few_times_however_many_collectives_there_are(
    deeper: Estimate, visited: dict[int, int]
) -> None:
    ((nodes, visits),) = visited.items()
    collectives = counts(deeper)
    assert sum(number for key, number in collectives.items() if key.endswith("tp")) > 25
    assert nodes < visits < 12 * nodes  # a look at all nodes for each collective would be more than 25


@pytest.fixture(scope="module")
def without_sequence() -> Estimate:
    return of_gpt(sequence=False)


def counts(found: Estimate) -> dict[str, int]:
    counted: dict[str, int] = {}
    for node in found.program.graph.nodes:
        if node.op == "call_function" and is_collective(node):
            key = f"{str(node.target).split('.')[1].removesuffix('_')} {node.args[-1]}"
            counted[key] = counted.get(key, 0) + 1
    return counted


def test_counts_by_axis_are_those_of_the_plan(gpt: Estimate, deeper: Estimate, without_sequence: Estimate) -> None:
    # Along shard, each unit is gathered for forward, and each but the root for backward; each of its two buffers (what
    # is cut, what is whole) is reduced.
    for depth, found in ((1, counts(gpt)), (2, counts(deeper)), (1, counts(without_sequence))):
        assert found["all_gather_into_tensor_coalesced shard"] == 2 * depth + 1
        assert found["reduce_scatter_tensor shard"] == 2 * (depth + 1)
        assert found["all_reduce shard"] == 1
    # Sequence parallelism: a block gathers before attention and feed-forward and scatters after them, and in backward
    # the other way round; the embedding scatters, the head gathers its input and its output. All-reduced are the two
    # weights of each norm, and the message of losses.
    for depth, found in ((1, counts(gpt)), (2, counts(deeper))):
        assert found["all_gather_into_tensor tp"] == 4 * depth + 3
        assert found["reduce_scatter_tensor tp"] == 4 * depth + 2
        assert found["all_reduce tp"] == 2 * (2 * depth + 1) + 1
    # Without: two sums forward, and backward one for the feed-forward and one each for q, k and v; the embedding's
    # forward, the head's backward, and the message. The head gathers its output.
    assert counts(without_sequence)["all_reduce tp"] == 6 * 1 + 3
    assert counts(without_sequence)["all_gather_into_tensor tp"] == 1


def test_a_derived_plan_sends_the_same_and_is_printed(without_sequence: Estimate) -> None:
    policy = Policy(lower="eager", bucket_mb=0, tp="auto")
    found = simulate(GPT, loss_fn, batch(0, 0), {"shard": 2, "tp": 2}, MACHINE, policy, units="layers.*")
    assert found.sent == without_sequence.sent
    assert "cut along tp by a plan derived from GPT and tried: " in str(found.plan)
    assert "layers.*.attention.k: colwise" in str(found.plan)


def late(graph: fx.Graph) -> list[str]:
    """The collectives along tp that could start sooner, or be waited for later, by the data alone."""
    order = positions(graph)
    nodes = list(graph.nodes)

    def lays_out(node: fx.Node) -> bool:
        return node.op == "call_function" and role_of(node) is None and (node.target in LAYOUT or is_view(node))

    def computes(first: int, stop: int) -> bool:
        return any(
            node.op == "call_function" and role_of(node) is None and not (
                lays_out(node) or is_wait(node) or is_collective(node)
            )
            for node in nodes[first:stop]
        )  # fmt: skip

    found = []
    for start in nodes:
        if start.op != "call_function" or not is_collective(start) or start.args[-1] != "tp" or role_of(start):
            continue
        if any(role_of(reader) == "flatten" for wait in start.users for reader in wait.users):
            continue  # a weight's gradient, which nothing else waits for
        sources = list(start.all_input_nodes)
        while any(map(lays_out, sources)):
            sources = [one for node in sources for one in (node.all_input_nodes if lays_out(node) else [node])]
        if computes(max(order[source] for source in sources) + 1, order[start]):
            found.append(f"{start.name} starts late")
        (wait,) = start.users
        readers = list(wait.users)
        while any(map(lays_out, readers)):
            readers = [one for node in readers for one in (node.users if lays_out(node) else [node])]
        near = [order[one] for one in readers if one.op != "output" and one.meta["phase"] == wait.meta["phase"]]
        if near and computes(order[wait] + 1, min(near)):
            found.append(f"{start.name} is waited for early")
    return found


def reductions(found: Estimate) -> list[int]:
    """Of each reduction of weights that all ranks along tp have, how many products are computed after its start."""
    nodes = list(found.program.graph.nodes)
    whole = {buffer.key for buffer in found.plan.buffers if not buffer.split}
    starts = [node for node in nodes if role_of(node) == "reduce" and node.meta["mark"].buffer in whole]
    return [sum(node.target is torch.ops.aten.mm.default for node in nodes[nodes.index(one) :]) for one in starts]


def test_they_start_and_are_waited_for_as_data_allows(gpt: Estimate, without_sequence: Estimate) -> None:
    for found in (gpt, without_sequence):
        assert late(found.program.graph) == []
        assert any("have compute to hide behind" in note and ", 0 have" not in note for note in found.program.notes)


def test_gradients_of_norms_do_not_hold_reductions_up(deeper: Estimate) -> None:
    assert [number > 0 for number in reductions(deeper)] == [
        True,
        True,
        False,
    ]  # root, layers.1, and layers.0, the last


def test_without_the_pass_all_of_it_is_late(monkeypatch: pytest.MonkeyPatch, deeper: Estimate) -> None:
    """The broken control."""
    rest = tuple(one for one in passes.DIFFERENTIATION if one is not passes.overlap)
    monkeypatch.setattr(passes, "DIFFERENTIATION", rest)
    plain = of_gpt(2)
    assert len(late(plain.program.graph)) >= 2
    assert reductions(plain) == [0, 0, 0]
    for lane in ("tp", "network", "compute"):
        assert deeper.timeline.busy(lane) == pytest.approx(plain.timeline.busy(lane))
    assert deeper.seconds < plain.seconds


def test_the_timeline_has_a_lane_of_what_goes_along_tp(gpt: Estimate) -> None:
    spans = gpt.timeline
    assert {span.lane for span in spans.spans} == {"network", "tp", "compute"}
    of_tp = [
        (2 if "all_reduce" in str(node.target) else 1, node)
        for node in gpt.program.graph.nodes
        if node.op == "call_function" and is_collective(node) and node.args[-1] == "tp"
    ]
    sizes = [t * max(n.meta["val"].nbytes, sum(s.meta["val"].nbytes for s in n.all_input_nodes)) for t, n in of_tp]
    expected = sum(t * MACHINE.latency for t, _ in of_tp) + sum(sizes) / 2 / MACHINE.inner  # type: ignore[operator]
    assert spans.busy("tp") == pytest.approx(expected)
    attention = [node for node in gpt.program.graph.nodes if "dot_product" in str(node.target)]
    assert len(attention) == 2 and all(flops(node) > 0 for node in attention)
    one_wire = replace(gpt.plan, machine=replace(MACHINE, inner=None, network=1e7, node=1))
    slow = estimate(gpt.program, one_wire)
    assert slow.busy("tp") > spans.busy("tp") and slow.busy("network") == pytest.approx(spans.busy("network"))
    assert slow.end > gpt.seconds


def test_simulate_says_that_a_rank_holds_less_and_where_the_bytes_go(gpt: Estimate) -> None:
    sharded = simulate(GPT, loss_fn, batch(0, 0), 4, MACHINE, Policy(lower="eager"))
    assert "tp" not in sharded.sent and gpt.sent["tp"][0] == sum(n for k, n in counts(gpt).items() if "tp" in k)
    assert gpt.sent["shard"][1] < 0.6 * sharded.sent["shard"][1]  # of parameters that are cut, a rank gathers its parts
    assert gpt.memory.peak.nbytes < sharded.memory.peak.nbytes
    text = str(gpt)
    assert "x 2 tensor-parallel" in text and "along tp" in text and "tp   " in text and "peak: " in text
    assert "wait for reduce_scatter_tensor_" in str(gpt.program)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="no axis"):
        simulate(GPT, loss_fn, batch(0, 0), 2, cut=cut)
    with pytest.raises(ValueError, match="expected a Cluster"):
        simulate(GPT, loss_fn, batch(0, 0), 2, "abacus")
    with pytest.raises(ValueError, match="no parameter is cut along it"):
        simulate(GPT, loss_fn, batch(0, 0), {"shard": 2, "tp": 2})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="process group is running"):
            simulate(GPT, loss_fn, batch(0, 0), 2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (Mesh(CPU, shard=2), "the mesh has no tp axis of several ranks"),
        (Mesh(CPU, tp=2), "it writes into the memory of other GPUs .* this mesh is of cpu devices"),
        (Mesh(torch.device("cuda"), tp=2), "it has not been run on a GPU under this package"),
    ],
)
def test_async_tensor_parallelism_is_refused_with_its_reason(place: Mesh, why: str) -> None:
    with pytest.raises(ValueError, match=f"Policy.async_tp is True, which is refused here: {why}"):
        check_policy(Policy(async_tp=True), place)
    check_policy(Policy(), place)


def test_async_tensor_parallelism_is_refused_before_anything_is_changed() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Policy\.async_tp is True"):
        compile_sharded(model, loss=lambda model, x: model(x).sum(), policy=Policy(lower="eager", async_tp=True))
    with pytest.raises(ValueError, match=r"Policy\.async_tp is True"):
        simulate(lambda: nn.Linear(2, 2), None, (torch.ones(2, 2),), 2, policy=Policy(async_tp=True))
    assert type(model.weight) is nn.Parameter and model(torch.ones(1, 2)).shape == (1, 2)
    try:
        with pytest.raises(ValueError, match=r"Policy\.async_tp is True"):
            fully_shard(model, policy=Policy(lower="eager", async_tp=True))  # which starts a process group of one
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"Policy\.async_tp is 'yes'"):
        Policy(async_tp="yes")  # type: ignore[arg-type]
