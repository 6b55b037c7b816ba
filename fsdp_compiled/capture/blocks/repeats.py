"""Differentiates a graph with few equal stretches in the place of a graph with many.

Of equal stretches of a graph that follow one another, such as a model's blocks, a few are differentiated.

    traced by Dynamo      before  0  1  2  3  4  5  6  7  after
    differentiated        before  0  1  2              7  after    after'  7'              2'  1'  0'  before'
    program               before  0  1  2  3  4  5  6  7  after    after'  7'  6'  5'  4'  3'  2'  1'  0'  before'

A *stretch* is a row of nodes. Its operators, arguments and layouts equal those of the stretch before it, moved on by
one stretch: it reads its own inputs (a block's parameters), results of the stretch before, and values that all of them
read. AOTAutograd walks through nodes one by one, and autograd runs backward through the order in which forward was
recorded. So the result for a stretch depends only on the stretch, on its neighbours and on values that all read, and
the result for the second, moved on by one stretch, is that for the third. This is compared node by node. If it does not
hold, the whole graph is differentiated as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fsdp_compiled.capture import aot
from fsdp_compiled.capture.aot import Traced
from fsdp_compiled.capture.blocks.equal_blocks import THIRD, Run, runs_of, with_body
from fsdp_compiled.capture.blocks.expand_repeats import ExpandedProgram, Unequal
from fsdp_compiled.capture.model_tensors import is_wrapped
from fsdp_compiled.capture.source_lines import MARK
from fsdp_compiled.ir.program import Port


class ReducedGraph:
    """The graph without the stretches that are like the third, and its inputs."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], runs: Sequence[Run]
    ) -> None:
        self._marks: dict[fx.Node, str] = {}  # of nodes that are kept
        instead: dict[fx.Node, fx.Node] = {}
        gone: set[Port] = set()
        for number, run in enumerate(runs):
            for index, stretch in enumerate(run.stretches):
                if (kept := run.kept(index)) is None:
                    instead.update(zip(stretch, run.stretches[THIRD], strict=True))
                    gone.update(run.own[index])
                else:
                    self._marks.update(dict.fromkeys(stretch, f"{MARK} {number} {kept}"))
        left = [place for place, port in enumerate(given) if port not in gone]
        self.inputs, self.given = [inputs[place] for place in left], [given[place] for place in left]
        places = module.graph.find_nodes(op="placeholder")
        away = {place for place, port in zip(places, given, strict=True) if port in gone}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._marked: list[tuple[fx.Node, str]] = []
        for node in module.graph.nodes:
            if node in away or node in instead:
                continue
            copy = copies[node] = graph.node_copy(node, lambda source: copies[instead.get(source, source)])
            if hasattr(node, "_dynamo_source"):
                copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
            if (mark := self._marks.get(node)) is not None:
                self._marked += [(inner, mark) for inner in (copy, *list(with_body(module, node))[1:])]
        self.module = fx.GraphModule(module, graph)
        self.module.meta.update(module.meta)
        if hasattr(module, "_param_name_to_source"):
            self.module._param_name_to_source = module._param_name_to_source

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Inside, the metadata of nodes says which stretch they are in. AOTAutograd copies it to the nodes it makes."""
        before = [(node, node.meta.get("nn_module_stack")) for node, _ in self._marked]
        for node, mark in self._marked:
            node.meta["nn_module_stack"] = {**(node.meta.get("nn_module_stack") or {}), mark: (mark, nn.Module)}
        try:
            yield
        finally:
            for node, stack in before:
                node.meta.pop("nn_module_stack")
                if stack is not None:
                    node.meta["nn_module_stack"] = stack


log = logging.getLogger("fsdp_compiled")


def differentiate(
    module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], results: Sequence[Port]
) -> Traced:
    """Calls `aot.differentiate` on a graph with only a few of many equal stretches."""
    # A tensor subclass becomes several inputs of the program.
    runs = (
        []
        if any(isinstance(one, torch.Tensor) and is_wrapped(one) for one in inputs)
        else runs_of(module, inputs, given)
    )
    if runs:
        short = ReducedGraph(module, inputs, given, runs)
        try:
            with short.marked():
                found = aot.differentiate(short.module, short.inputs, short.given, results)
            return ExpandedProgram(module, found, runs, given).traced()
        except Unequal as why:
            log.info("equal blocks are differentiated one by one: %s", why)
    return aot.differentiate(module, inputs, given, results)
