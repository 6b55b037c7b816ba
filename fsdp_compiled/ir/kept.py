"""A program whose graph is given away, as it was: what each node is, for a quarter of what a copy takes to make.

kept = Kept(program)        the rows of its nodes: operator, arguments, and what is noted of it
...                         passes change the graph itself
kept.program()              a graph of these rows, where somebody looks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from fsdp_compiled.ir.node_copies import Names, Row, copied_node, give_names, names_of, row_of
from fsdp_compiled.ir.program import Program


class Kept:
    """What it takes to make a program again."""

    def __init__(self, program: Program) -> None:
        self._rest = replace(program, graph=fx.Graph(), donated=False)
        self._rows = [row_of(node) for node in program.graph.nodes]
        self._names = names_of(program.graph)

    def program(self) -> Program:
        """Node for node and name for name what it was, in a graph of its own."""
        return replace(self._rest, graph=copied(self._rows, self._names, {}))


def copied(rows: Iterable[Row], names: Names, mapping: dict[fx.Node, fx.Node]) -> fx.Graph:
    """A graph of these nodes; ``mapping`` is filled with each one's copy.

    What is inserted later has the same name in the copy as in that of which they are.
    """
    graph = fx.Graph()
    for row in rows:
        mapping[row[0]] = copied_node(graph, row, mapping.__getitem__)
    give_names(graph, names)
    return graph
