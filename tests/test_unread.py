"""What nothing reads of a trace is left out: graph and marks are those of a trace that has all of it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.builder import VariableBuilder

from fsdp_compiled.capture import dynamo, dynamo_run, unread
from tests.equal_models import captured

OUTSIDE = nn.Linear(8, 8)  # of no model


class Around(nn.Module):
    """Reads a module of its own, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for one in self.inner:
            x = one(x)
        return x + OUTSIDE.weight.detach().sum()


@contextlib.contextmanager
def nothing_left_out() -> Iterator[None]:
    yield


def traced(patch: pytest.MonkeyPatch, everything: bool) -> tuple[list[Any], Counter[str]]:
    """The graph of such a model, its inputs' marks with it; how often Dynamo did what is left out."""
    nodes: list[Any] = []
    done: Counter[str] = Counter()
    complete, mark, code = dynamo_run.Trace.complete, VariableBuilder.mark_static_input, fx.Graph.python_code
    names = OutputGraph.get_chained_param_buffer_source

    def seen(self: Any) -> None:
        complete(self)
        graph = self.short.module.graph
        for node, value in zip(graph.find_nodes(op="placeholder"), self.short.inputs, strict=True):
            nodes.append((node.name, getattr(value, "_dynamo_static_input_type", None)))
        nodes.extend((node.op, str(node.target), str(node.args)) for node in graph.nodes)

    def counted(name: str, function: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            done[name] += 1
            return function(*given, **named)

        return run

    with patch.context() as inside:
        inside.setattr(dynamo_run.Trace, "complete", seen)
        inside.setattr(VariableBuilder, "mark_static_input", counted("marks", mark))
        inside.setattr(fx.Graph, "python_code", counted("code", code))
        inside.setattr(OutputGraph, "get_chained_param_buffer_source", counted("names", names))
        if everything:
            inside.setattr(dynamo.unread, "left_out", nothing_left_out)
        inside.setitem(globals(), "OUTSIDE", nn.Linear(8, 8))  # which has no mark yet
        captured(Around(), lambda model, x: model(x).sum())
    return nodes, done


def test_the_graph_is_the_same_and_less_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch, everything=False)  # the first trace of a process does more
    less, few = traced(monkeypatch, everything=False)
    all_of_it, many = traced(monkeypatch, everything=True)
    assert less == all_of_it
    assert {kind for node in less for kind in node[1:2]} >= {"unguarded"}  # the marks were compared
    assert few["names"] == 0 < many["names"]
    assert few["code"] < many["code"]
    assert few["marks"] < many["marks"] / 2


def test_what_others_trace_is_as_ever() -> None:
    """On another thread, and afterwards."""
    recompiled: list[str] = []

    def elsewhere() -> None:
        recompiled.append(fx.symbolic_trace(nn.Linear(2, 2)).code)

    before = [VariableBuilder.wrap_module, OutputGraph.compile_and_call_fx_graph, fx.GraphModule.recompile]
    with unread.left_out():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "linear" in recompiled[0]
    assert before == [VariableBuilder.wrap_module, OutputGraph.compile_and_call_fx_graph, fx.GraphModule.recompile]
