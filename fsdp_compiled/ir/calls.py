"""Finds the calls in a graph by a property of their operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def calls(graph: fx.Graph, are: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Those, in order, of whose operator this holds: it is asked of one call of each."""
    asked: dict[Any, bool] = {}
    found = []
    for node in graph.nodes:
        if node.op == "call_function":
            if (wanted := asked.get(node.target)) is None:
                wanted = asked[node.target] = are(node)
            if wanted:
                found.append(node)
    return found
