"""A graph's function computes what `fx.GraphModule`'s does, lets values go as early, and shows its lines in errors."""

from __future__ import annotations

import math
import operator
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fsdp_compiled.lower.program_code import Code, with_room

aten = torch.ops.aten


def graph_of(watch: Callable[..., torch.Tensor] = lambda x: x + 1) -> fx.Graph:
    graph = fx.Graph()
    x, _1 = graph.placeholder("x"), graph.placeholder("_1")  # a name as the constants have
    a = graph.call_function(aten.where.ScalarOther, (graph.call_function(aten.gt.Scalar, (x, 0)), x, -math.inf))
    b = graph.call_function(aten.amax.default, (a, [0]), {"keepdim": True})
    c = graph.call_function(aten._to_copy.default, (b,), {"dtype": torch.float64, "device": torch.device("cpu")})
    graph.call_function(watch, (c,))
    d = graph.call_function(aten.add.Tensor, (c, _1), {"alpha": 2.5})
    e = graph.call_function(torch.stack, ([d, d], 0))
    f = graph.call_function(torch.Tensor.__getitem__, (e, (slice(None, 1, None), 0)))
    graph.output([f, None, e])
    return graph


def test_the_function_computes_what_torchs_does() -> None:
    given = torch.tensor([[1.0, -2.0], [-3.0, 4.0]]), torch.ones(2)
    graph = graph_of()
    mine, torchs = Code(graph).run(*given), fx.GraphModule(nn.Module(), graph)(*given)
    assert torch.equal(mine[0], torchs[0]) and mine[1] is None and torch.equal(mine[2], torchs[2])
    assert mine[0].tolist() == [[3.5, 6.5]] and mine[0].dtype == torch.float64


def test_values_are_let_go_after_their_last_use() -> None:
    alive: list[Any] = []

    def makes(x: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(result := x + 1))
        return result

    def counts(x: torch.Tensor) -> int:
        return sum(ref() is not None for ref in alive)

    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(makes, (x,))
    b = graph.call_function(makes, (a,))
    graph.call_function(makes, (b,))  # which nothing reads
    first = graph.call_function(counts, (b,))
    c = graph.call_function(makes, (b,))
    graph.output([first, graph.call_function(counts, (c,)), a])
    results = Code(graph).run(torch.ones(1))
    assert results[:2] == [2, 2]  # a and b, then a and c


def test_an_error_shows_the_line_and_its_place() -> None:
    def breaks(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("here")

    code = Code(graph_of(breaks))
    with pytest.raises(RuntimeError, match="here") as error:
        code.run(torch.ones(2, 2), torch.ones(2))
    (frame,) = [one for one in traceback.extract_tb(error.tb) if one.name == "run"]
    assert frame.line is not None and frame.line.startswith("breaks = ") and "_to_copy" in frame.line
    place, values = code.reached(error.tb) or (0, {})
    assert code.nodes[place].target is breaks and "_to_copy_default" in values


@pytest.mark.parametrize("boxed", [False, True], ids=["given", "boxed"])
def test_inputs_are_let_go_after_their_last_use(boxed: bool) -> None:
    seen: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        seen.append(sum(ref() is not None for ref in inputs))
        return x + 1

    graph = fx.Graph()
    x, y, _ = (graph.placeholder(name) for name in ("x", "y", "unread"))
    a = graph.call_function(counts, (x,))
    b = graph.call_function(counts, (a,))
    c = graph.call_function(counts, (graph.call_function(torch.add, (b, y)),))
    graph.output([graph.call_function(counts, (c,))])
    code = Code(graph, boxed=boxed)
    given = [torch.ones(1) for _ in range(3)]
    inputs = [weakref.ref(one) for one in given]
    if boxed:
        code.function(code, given)
        assert not given and seen == [2, 1, 0, 0]
    else:
        code.run(*given)
        given.clear()
    assert not any(ref() is not None for ref in inputs)


def test_a_long_program_is_a_function_too() -> None:
    """With more inputs than CPython once allowed, and as many lines as a model of 100 layers has."""

    def breaks(_: torch.Tensor) -> None:
        raise RuntimeError("here")

    graph = fx.Graph()
    value, *others = (graph.placeholder(f"in_{place}") for place in range(1_000))
    for _ in range(12):
        for other in others:
            value = graph.call_function(operator.add, (value, other))
    end = graph.call_function(breaks, (value,))
    graph.output([others[7]])
    code = Code(graph)
    with pytest.raises(RuntimeError, match="here") as error:
        code.run(*range(1_000))
    place, values = code.reached(error.tb) or (0, {})
    assert code.nodes[place] is end and values[value.name] == 12 * sum(range(1_000)) and values["in_8"] == 8
    assert code.reached(None) is None


@pytest.mark.parametrize("count", [1, 3_000, 40_000])
def test_a_frame_leaves_room_for_the_frames_of_what_it_calls(count: int) -> None:
    """CPython takes frames from chunks of a power of two, in slots of 8 bytes: this one fills half of its chunk."""
    names = ", ".join(f"v{place}" for place in range(count))
    values: dict[str, Any] = {}
    exec(f"def run(given):\n [{names}] = given\n return v{count - 1}", values)
    run = values["run"]
    run.__code__ = with_room(run.__code__)
    assert run(list(range(count))) == count - 1
    slots = run.__code__.co_nlocals + run.__code__.co_stacksize
    chunk = 1 << (slots + 1_000).bit_length()
    assert chunk - slots > 30_000 and slots > chunk / 2


def test_a_program_runs_in_such_a_frame() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.neg, (x,))])
    code = Code(graph)
    assert code.function.__code__.co_stacksize > 1 << 15 and code.run(torch.ones(()))[0] == -1
