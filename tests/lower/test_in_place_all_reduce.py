"""All-reduces that write their input: no copy before them, the same bits, and where the input is left as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled import Policy, simulate
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.lower.fusions.reductions import in_place_all_reduce
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.simulate import Estimate
from tests.models import Block, Recipe
from tests.recipes import trained

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
WITHOUT = ("in_place_all_reduce",)
HSDP = {"replicate": 2, "shard": 2}


# Counts and memory, of programs for GPUs.


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))


def estimate(mesh: Mapping[str, int] | int, shard: str, without: tuple[str, ...] = ()) -> Estimate:
    policy = Policy(shard=shard, bucket_mb=0, without=without)
    return simulate(model, lambda m, x: m(x).square().mean(), (torch.zeros(2, 256),), mesh, "gpu", policy)


def copies(made: Estimate) -> tuple[int, int]:
    """How many all-reduces copy their input first, and the bytes of the copies."""
    found = made.program.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    return len(found), sum(node.meta["val"].nbytes for node in found)


@pytest.mark.parametrize(("mesh", "shard"), [(2, "ddp"), (2, "zero1"), (HSDP, "zero3"), (2, "zero3")], ids=str)
def test_no_gradient_is_copied_before_its_reduction(mesh: Mapping[str, int] | int, shard: str) -> None:
    before, after = estimate(mesh, shard, WITHOUT), estimate(mesh, shard)
    gradients = sum(buffer.numel * 4 for buffer in before.plan.buffers)
    counted, nbytes = copies(before)
    reports = 2 if mesh is HSDP else 1
    assert counted == reports + (0 if (mesh, shard) == (2, "zero3") else len(before.plan.buffers))
    wanted = {"ddp": gradients, "zero1": gradients}.get(shard, gradients // 2 if mesh is HSDP else 0)
    assert nbytes == wanted + reports * 8 * 8  # bytes of the eight numbers of `report`
    assert copies(after) == (0, 0)
    assert len(before.program.graph.nodes) == len(after.program.graph.nodes)


@pytest.mark.parametrize("shard", ["ddp", "zero1"])
def test_nor_is_it_in_memory_twice(shard: str) -> None:
    """While a gradient's reduction starts, it is there once."""
    heights = []
    for without in (WITHOUT, ()):
        made = estimate(2, shard, without)
        starts = {node.name for node in made.program.marked("reduce")}
        heights.append([moment.nbytes for moment in made.memory.timeline if moment.node in starts])
    saved = [before - after for before, after in zip(*heights, strict=True)]
    assert saved == [buffer.numel * 4 for buffer in reversed(estimate(2, shard).plan.buffers)]


# Numbers.


@pytest.mark.parametrize(("shard", "replicate"), [("ddp", 1), ("zero1", 1), ("zero3", 2)])
@pytest.mark.parametrize("accumulate", ["shards", "full"])
def test_the_numbers_are_the_same_bits(shard: str, replicate: int, accumulate: str) -> None:
    def what(without: tuple[str, ...]) -> Recipe:
        policy = Policy(shard=shard, lower="eager", bucket_mb=0, accumulate=accumulate, clip=0.1, without=without)
        return Recipe((Block("linear"), Block("unreached")), policy=policy, optimizer="adamw", replicate=replicate)

    plain, written = trained(what(WITHOUT), 2, 2), trained(what(()), 2, 2)
    assert "all_reduce_(" in written.program.text() and "all_reduce_(" not in plain.program.text()
    assert written.losses == plain.losses
    assert all(torch.equal(value, plain.parameters[name]) for name, value in written.parameters.items())


def test_a_sum_in_what_is_read_later_is_noticed() -> None:
    """The control: the loss of each rank, as it was before ranks were added up, is read once more afterwards."""

    def read_later(in_place: bool) -> Callable[[Program, Plan], Program]:
        def damage(program: Program, plan: Plan) -> Program:
            edit = Edit(program)
            sent = [node for node in edit.graph.nodes if "all_reduce" in str(node.target)][-1]
            norm = next(node for port, node in edit.outputs.items() if port.kind == "norm")
            assert norm is not None
            with edit.at(edit.end, "update"):
                own = edit.call(aten.select.int, sent.args[0], 0, 0, mark=Mark("norm"))
                own = edit.call(aten._to_copy.default, own, dtype=torch.float32, mark=Mark("norm"))
                edit.set_output(Port("out", "norm"), own)
            program = edit.done("read_later")
            return forced(program) if in_place else in_place_all_reduce(program, plan)

        return damage

    def forced(program: Program) -> Program:
        edit = Edit(program)
        for node in edit.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
            node.target = c10d.all_reduce_.default
        return edit.done("forced")

    policy = Policy(shard="ddp", lower="eager", bucket_mb=0, without="all")
    what = Recipe((Block("linear"),), policy=policy)
    with pytest.raises(AssertionError, match="the ranks see different numbers"):  # each its own, as it must be
        trained(what, 1, damage=read_later(False))
    trained(what, 1, damage=read_later(True))  # where the sum of all has taken its place


# Where it stays: hand-written graphs.


def made(build: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node | list[fx.Node]]) -> bool:
    """Whether the all-reduce of a graph that ``build`` fills writes its input; ``build`` is given what makes a value,
    and an input of the program, and returns what leaves beside the sums."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        value = torch.empty(4, 4)
    given = graph.placeholder("given")
    given.meta["val"] = value
    computed = graph.call_function(aten.mul.Tensor, (given, 2))
    left = build(graph, computed, given)
    rest = left if isinstance(left, list) else [left]
    graph.output(rest)
    for node in graph.nodes:
        if node.op == "call_function":
            args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
            with mode:
                node.meta["val"] = args[0] if "c10d" in str(node.target) else node.target(*args)
            node.meta["phase"] = "backward"
    ports = (Port("in", "batch", "given"), *(Port("out", "gradient", str(index)) for index in range(len(rest))))
    result = in_place_all_reduce(Program(graph, ports, ()), None)  # type: ignore[arg-type]
    (sent,) = [node for node in result.graph.nodes if "all_reduce" in str(node.target)]
    return sent.target is c10d.all_reduce_.default


def reduced(graph: fx.Graph, value: fx.Node) -> fx.Node:
    return graph.call_function(c10d.wait_tensor.default, (_sent(graph, value),))


def _sent(graph: fx.Graph, value: fx.Node) -> fx.Node:
    return graph.call_function(c10d.all_reduce.default, (value, "sum", "shard"))


def test_where_nothing_else_reads_it() -> None:
    def view(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> fx.Node:
        return reduced(graph, graph.call_function(aten.view.default, (computed, [16])))

    def read_before(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> list[fx.Node]:
        before = graph.call_function(aten.sum.default, (computed,))
        return [before, reduced(graph, computed)]

    def written_before(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> fx.Node:
        return reduced(graph, graph.call_function(aten.add_.Tensor, (computed, 1)))

    assert made(lambda graph, computed, given: reduced(graph, computed))
    assert made(view) and made(read_before) and made(written_before)


def test_where_it_stays_as_it_was() -> None:
    def read_after(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> list[fx.Node]:
        return [reduced(graph, computed), graph.call_function(aten.sum.default, (computed,))]

    def read_after_through_a_view(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> list[fx.Node]:
        view = graph.call_function(aten.view.default, (computed, [16]))
        return [reduced(graph, computed), graph.call_function(aten.sum.default, (view,))]

    def leaves(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> list[fx.Node]:
        return [reduced(graph, computed), computed]

    def part_of_an_input(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> fx.Node:
        return reduced(graph, graph.call_function(aten.view.default, (given, [16])))

    def written_input(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> fx.Node:
        return reduced(graph, graph.call_function(aten.add_.Tensor, (given, 1)))

    def transposed(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> fx.Node:
        return reduced(graph, graph.call_function(aten.t.default, (computed,)))

    def on_the_wire(graph: fx.Graph, computed: fx.Node, given: fx.Node) -> list[fx.Node]:
        gather = graph.call_function(c10d.all_gather_into_tensor.default, (computed, 2, "shard"))
        return [reduced(graph, computed), graph.call_function(c10d.wait_tensor.default, (gather,))]

    kept = (read_after, read_after_through_a_view, leaves, part_of_an_input, written_input, transposed, on_the_wire)
    assert not any(map(made, kept))
