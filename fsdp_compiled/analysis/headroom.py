"""Headroom: where a value may be alive for longer without raising a program's peak.

    bytes alive     3  5  9  7  6  8  4        the peak is 9
    left            6  4  0  2  3  1  5
    2 bytes that are needed at the last node may be there from the node after the one that leaves 1

What is taken is taken from what is left, so that several things that are moved, one after the other, do not raise it
together either.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fsdp_compiled.analysis.kernel_workspace import backend_of
from fsdp_compiled.analysis.memory import Persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan


class Headroom:
    """By node of a program, the bytes that are left under its predicted peak; nodes are known by their names."""

    def __init__(self, program: Program, plan: Plan) -> None:
        memory = predict(program, plan, Persistent(), backend_of(plan.device))
        peak = max((moment.nbytes for moment in memory.timeline), default=0)
        self.left = {moment.node: peak - moment.nbytes for moment in memory.timeline}

    def earliest(self, nodes: Sequence[fx.Node], first: int, place: int, nbytes: int) -> int:
        """The first place from which on so many bytes may be alive until ``place``; not before ``first``."""
        while place > first and self._holds(nodes[place - 1], nbytes):
            place -= 1
        return place

    def until(self, node: fx.Node, last: fx.Node, nbytes: int) -> list[fx.Node]:
        """The nodes from this one on during which so many bytes may be alive; none from ``last`` on."""
        found = []
        while node < last and self._holds(node, nbytes):
            found.append(node)
            node = node.next
        return found

    def take(self, nodes: Sequence[fx.Node], nbytes: int) -> None:
        """So many bytes more are alive while these nodes run."""
        for node in nodes:
            if node.name in self.left:
                self.left[node.name] -= nbytes

    def stand(self, nodes: Sequence[fx.Node], beside: fx.Node) -> None:
        """These nodes run where that one does from now on, and what is left there is left while they do."""
        for node in nodes:
            self.left[node.name] = self.left.get(beside.name, 0)

    def _holds(self, node: fx.Node, nbytes: int) -> bool:
        return self.left.get(node.name, nbytes) >= nbytes
