"""Describes what a traced graph computes, so that the trace of one call can be compared with that of the next.

Each value has a hash of its operator and of its arguments' hashes, so it is the same wherever it is computed. The first
call may compute a table from no input, which the next one finds: ``if self.mask is None: self.mask = ...``. It has the
same hash in both. Values that are only left on Python objects, and counters, are not compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

RANDOM = re.compile(r"rand|dropout|normal_|^normal$|bernoulli|multinomial|poisson|uniform|exponential|cauchy|gumbel")


class Meaning:
    """The wanted results and the in-place writes of one graph. ``inputs``: the name of each placeholder.

    ``known``: placeholders whose value was computed from no input, with its hash.
    """

    def __init__(
        self,
        module: nn.Module,
        wanted: Iterable[tuple[str, fx.Node]],
        inputs: Mapping[fx.Node, str],
        known: Mapping[fx.Node, str] | None = None,
    ) -> None:
        self._modules = dict(module.named_modules())
        self._names: dict[fx.Node, str] = {}
        self._roots: dict[fx.Node, set[fx.Node]] = {}  # the inputs and new tensors whose memory a value may be in
        self.constant: dict[fx.Node, str] = {}  # values computed from nothing
        self._writes: list[str] = []
        self._drawn = 0
        known = known or {}
        for node in module.graph.nodes:  # type: ignore[union-attr]
            if node.op == "placeholder":
                self._names[node] = known.get(node, inputs.get(node, node.name))
                self._roots[node] = {node}
                if node in known:
                    self.constant[node] = known[node]
            elif node.op != "output":
                self._add(node)
        self.results = {name: self._names[node] for name, node in wanted}

    def same(self, other: Meaning) -> bool:
        return self.results == other.results and self._writes == other._writes

    def _add(self, node: fx.Node) -> None:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", str(node.target))
        if node.op in ("get_attr", "call_module"):
            inner = self._modules.get(str(node.target))
            target = _body(inner) if isinstance(inner, fx.GraphModule) else target
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: self._names[source])
        random = RANDOM.search(target) is not None
        self._drawn += random
        name = _hash(node.op, target, arguments, self._drawn if random else "")
        sources = node.all_input_nodes
        self._names[node] = name
        self._roots[node] = set().union(*(self._roots[source] for source in sources)) or {node}
        if not random and node.op != "get_attr" and all(source in self.constant for source in sources):
            self.constant[node] = name
        if sources and _writes(node):
            self._write(sources[0], name)

    def _write(self, target: fx.Node, how: str) -> None:
        """From here on, every value that may share memory with the target has a new hash."""
        if target not in self.constant:
            self._writes.append(how)
        for node, roots in self._roots.items():
            if roots & self._roots[target]:
                self._names[node] = _hash(self._names[node], how)
                if node in self.constant:
                    self.constant[node] = self._names[node]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _body(inner: fx.GraphModule) -> str:
    """The body of a checkpointed region, or of another operator that has one."""
    values = inner.graph.output_node().all_input_nodes
    places = {node: f"input {index}" for index, node in enumerate(inner.graph.find_nodes(op="placeholder"))}
    found = Meaning(inner, ((str(index), node) for index, node in enumerate(values)), places)
    return _hash(found.results, found._writes)


def _writes(node: fx.Node) -> bool:
    """Whether the node may write a tensor in place: ``add_``, ``x[0] = y``, ``out=``."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "__setitem__") or "out" in node.kwargs
    )
