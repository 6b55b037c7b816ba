"""Calls found by their operator, in the table that a graph keeps: a walk over all nodes takes as long as a pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fsdp_compiled.torch_private.fx_graph import calls_by_operator


def calls(graph: fx.Graph, are: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Those, in order, of whose operator this holds: it is asked of one call of each."""
    return sorted(node for nodes in calls_by_operator(graph) if are(nodes[0]) for node in nodes)
