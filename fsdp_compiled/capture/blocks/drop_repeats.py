"""The graph that is differentiated in the place of one with many equal stretches: with few of them (see `repeats`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from fsdp_compiled.capture.blocks.elided_blocks import Absent
from fsdp_compiled.capture.blocks.equal_blocks import THIRD, Run, with_body
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
                if isinstance(stretch, Absent):
                    continue
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
        for name in ("_param_name_to_source",):
            if hasattr(module, name):
                setattr(self.module, name, getattr(module, name))

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Inside, nodes say in which stretch they are, where AOTAutograd takes it on to what it makes of them."""
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
