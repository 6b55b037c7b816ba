"""Liveness: how long each unit stays gathered, read off a program's graph.

    root       |=====================================|      a live range: from the first of the unit's all-gathers
    layers.0     |====|                      |====|         to the last use of what they brought, aliases included
    layers.1          |====|            |====|
               forward                 backward

A unit that is gathered again has several. A unit whose all-gathers overlap (one a dtype) has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.nodes import Phase, is_view, positions, role_of

CHAIN = ("part", "wait", "unpack", "block", "view")


@dataclass
class LiveRange:
    """One stretch of a program in which a unit is gathered. Positions are places in the order of execution."""

    unit: str
    gathers: list[fx.Node] = field(default_factory=list)  # the collectives
    aliases: set[fx.Node] = field(default_factory=set)  # every node that holds what they gather
    uses: list[fx.Node] = field(default_factory=list)  # the nodes that read it, in order; the output node may be one
    start: int = 0  # of the first collective
    stop: int = 0  # of the last use

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered buffers."""
        values = [leaf for node in self.gathers for leaf in pytree.tree_leaves(node.meta["val"])]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    @property
    def issue(self) -> list[fx.Node]:
        """The nodes that gather a unit: casts, packing, collectives, and parts of their results."""
        found: list[fx.Node] = []
        for gather in self.gathers:
            made: list[fx.Node] = []
            sources = gather.all_input_nodes
            while sources := [source for source in sources if role_of(source) in ("cast", "pack")]:
                made[:0] = sources
                sources = [before for source in sources for before in source.all_input_nodes]
            found += made
            found += [gather, *sorted(user for user in gather.users if role_of(user) == "part")]  # in graph order
        return found

    def first_use(self, phase: Phase) -> fx.Node | None:
        return next((node for node in self.uses if node.op == "call_function" and node.meta["phase"] == phase), None)


def live_ranges(graph: fx.Graph) -> list[LiveRange]:
    """All live ranges, in the order in which their gathers start."""
    order = positions(graph)
    found: list[LiveRange] = []
    for node in graph.nodes:
        if role_of(node) == "gather":
            mine = _live_range(node, order)
            same = [one for one in found if one.unit == mine.unit and one.start <= mine.stop and mine.start <= one.stop]
            if not same:
                found.append(mine)
                continue
            one = same[0]
            one.gathers += mine.gathers
            one.aliases |= mine.aliases
            one.uses = sorted({*one.uses, *mine.uses}, key=order.__getitem__)
            one.start, one.stop = min(one.start, mine.start), max(one.stop, mine.stop)
    return found


def alive(found: list[LiveRange], position: int) -> set[str]:
    """The units that are gathered, or on their way, at this place of the program."""
    return {live_range.unit for live_range in found if live_range.start <= position <= live_range.stop}


def most_gathered(found: list[LiveRange]) -> int:
    """The largest number of units gathered at once; it is reached where one of them starts."""
    return max((len(alive(found, live_range.start)) for live_range in found), default=0)


def _live_range(gather: fx.Node, order: dict[fx.Node, int]) -> LiveRange:
    aliases: set[fx.Node] = set()
    uses: set[fx.Node] = set()
    stack = [gather]
    while stack:
        for user in stack.pop().users:
            if role_of(user) in CHAIN or is_view(user):
                if user not in aliases:
                    aliases.add(user)
                    stack.append(user)
            else:
                uses.add(user)
    in_order = sorted(uses, key=order.__getitem__)
    stop = max(order[node] for node in {gather, *aliases, *uses})
    return LiveRange(gather.meta["mark"].unit, [gather], aliases, in_order, order[gather], stop)
