"""What is refused in a graph and what is not, rule by rule, on programs made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.ir.nodes import c10d
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.lower.capturable import INDEXING, READS, RULES, obstacles, sentence
from tests.toys import batches, build, mse

aten = torch.ops.aten
GPU = torch.device("meta")  # any device that is not the CPU
Make = Callable[[fx.Graph, fx.Node], Any]


def vector(dtype: torch.dtype = torch.float32, device: Any = GPU) -> torch.Tensor:
    return torch.empty(4, dtype=dtype, device=device)


def program(make: Make, kind: str = "batch", device: Any = GPU) -> Program:
    """One input, and what is made of it in ``layers.0``."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = vector(device=device)
    graph.output([make(graph, given)])
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta |= {"phase": "forward", "path": "layers.0"}
            node.meta.setdefault("val", vector())
    return Program(graph, (Port("in", kind, "[0]"), Port("out", "aux", "0")), ("by hand",))


def call(target: Any, *arguments: Any, val: Any = None, **named: Any) -> Make:
    """A call on the input, with the values of further operands as they are given."""

    def make(graph: fx.Graph, given: fx.Node) -> fx.Node:
        node = graph.call_function(target, (given, *arguments), named)
        if val is not None:
            node.meta["val"] = val
        return node

    return make


def masked(target: Any, dtype: torch.dtype) -> Make:
    def make(graph: fx.Graph, given: fx.Node) -> fx.Node:
        mask = graph.call_function(aten.ones_like.default, (given,))
        mask.meta["val"] = vector(dtype)
        return graph.call_function(target, (given, [mask], *([given] if "put" in str(target) else [])))

    return make


def reduction(graph: fx.Graph, given: fx.Node) -> fx.Node:
    sent = graph.call_function(c10d.all_reduce.default, (given, "sum", "shard"))
    return graph.call_function(c10d.wait_tensor.default, (sent,))


REFUSED: dict[str, tuple[Make, str]] = {
    "item": (call(aten._local_scalar_dense.default, val=1.0), "the host reads a number"),
    "equal": (call(aten.equal.default, val=True), "the host reads a number"),
    "if": (call(aten.is_nonzero.default, val=True), "the host reads a number"),
    "assert": (call(aten._assert_scalar.default, "no", val=None), "the host reads a number"),
    "nonzero": (call(aten.nonzero.default), "depends on values"),
    "masked_select": (call(aten.masked_select.default), "depends on values"),
    "unique": (call(aten._unique2.default), "depends on values"),
    "repeat_interleave": (call(aten.repeat_interleave.Tensor), "depends on values"),
    "mask": (masked(aten.index.Tensor, torch.bool), "a mask picks elements"),
    "byte mask": (masked(aten.index.Tensor, torch.uint8), "a mask picks elements"),
    "mask written": (masked(aten.index_put_.default, torch.bool), "a mask picks elements"),
    "offload": (call(aten._to_copy.default, device="cpu", val=vector(device="cpu")), "made on the CPU"),
    "cpu scalar": (call(aten.full_like.default, 1, val=torch.empty(())), "made on the CPU"),
    "generator": (call(aten.bernoulli.default, generator=torch.Generator()), "generator of its own"),
    "foreign collective": (call(c10d.wait_tensor.default), "started outside"),
}
FINE: dict[str, Make] = {
    "arithmetic": call(aten.mul.Tensor, 2.0),
    "dropout": call(aten.bernoulli.default),
    "index": masked(aten.index.Tensor, torch.int64),
    "index written": masked(aten.index_put_.default, torch.int64),
    "assert on the device": call(aten._assert_async.msg, "no"),
    "reduction": reduction,
}


def found(made: Program, backends: dict[str, str] | None = None) -> list[str]:
    return obstacles(made, GPU, backends or {"shard": "nccl"}, {"nccl"})


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_with_the_place_and_the_cure(name: str) -> None:
    make, reason = REFUSED[name]
    (line,) = found(program(make))
    assert reason in line and line.startswith("layers.0: ") and line.endswith(".")


@pytest.mark.parametrize("name", FINE)
def test_what_a_graph_can_hold_is_not(name: str) -> None:
    assert found(program(FINE[name])) == []


def test_every_rule_was_broken_above() -> None:
    makes = [make for make, _ in REFUSED.values()]
    reasons = [line for make in (*makes, call(named("run_and_save_rng_state"))) for line in found(program(make))]
    for _, reason in RULES:
        assert any(line.endswith(reason) for line in reasons), reason
    assert all(isinstance(target, torch._ops.OpOverload) for target in (*READS, *INDEXING))


def named(name: str) -> Any:
    def target(*_: Any) -> None: ...

    target.__name__ = name
    return target


@pytest.mark.parametrize("kind", ["constant", "buffer", "scale"])
def test_an_input_on_the_cpu_is_refused(kind: str) -> None:
    (line,) = found(program(FINE["arithmetic"], kind, "cpu"))
    assert line.startswith(f"{kind} [0] is on the cpu") and "register_buffer" in line


def test_sizes_that_move_are_refused() -> None:
    (line,) = found(program(FINE["arithmetic"], "size"))
    assert "Policy.dynamic" in line


@pytest.mark.parametrize("backend", ["gloo", "mpi", "fake"])
def test_collectives_of_the_host_are_refused_once(backend: str) -> None:
    (line,) = found(program(reduction), {"shard": backend})
    assert f"along 'shard' go through {backend}" in line and "with nccl" in line


def test_many_obstacles_are_cut_short() -> None:
    text = sentence([f"reason {number}" for number in range(5)])
    assert text.splitlines() == ["  reason 0", "  reason 1", "  reason 2", "  and 2 more"]


def test_a_step_of_this_package_has_no_obstacle() -> None:
    """On the device that its tensors are on."""
    model = build(dropout=0.1)
    policy = Policy(lower="eager", clip=1.0, loss_scale="dynamic")
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters()), loss=mse, policy=policy)
    sharded.step(*batches(1)[0])
    assert obstacles(sharded.program, torch.device("cpu"), {}, set()) == []
    assert obstacles(sharded.program, GPU, {}, set())  # the control: all of it is on the CPU
