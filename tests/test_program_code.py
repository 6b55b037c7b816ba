"""A graph's function computes what `fx.GraphModule`'s does, lets values go as early, and shows its lines in errors."""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fsdp_compiled.lower.program_code import Code

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
    assert frame.lineno is not None and code.nodes[code.position(frame.lineno)].target is breaks
