"""What forward keeps for backward and could wait in host memory, and what it would cost to send it there and back.

    compute    |== layers.0 ==|== layers.1 ==|== layers.2 ==| backward ...
    the link       |- a ------|- b -|     |- c ---------|                       a, b, c: hidden under compute
                                                     |- d ---|                  d: ends after forward, in the open

The link (`Cluster.host` bytes a second, in each direction) takes values in the order in which forward is done with
them. One whose copy ends within forward, and that backward does not need before it could be back, costs two launches
and the traffic of two copies in device memory; the others are paid for, there and back. That is so if all are sent; of
fewer, more are hidden. A value that is made again at less is left to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from fsdp_compiled.analysis.roofline import nbytes, seconds
from fsdp_compiled.analysis.saved_values import SMALL, Saved
from fsdp_compiled.ir.nodes import base_of, gathered, is_alias, is_view, mutated, positions, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

LAUNCH = 1e-5  # seconds that a copy takes of compute's stream, however small


@dataclass
class Kept:
    """A value with its views in forward, where forward uses it last, and what reads it later."""

    value: fx.Node
    aliases: set[fx.Node]  # the value itself among them
    last: fx.Node
    readers: list[fx.Node]  # in backward, in order

    @property
    def name(self) -> str:
        return self.value.name


def kept(value: fx.Node, order: Mapping[fx.Node, int]) -> Kept | None:
    """None where it has to stay: it leaves, is written, is part of something else, or not read in backward alone."""
    if not _has_own_memory(value):
        return None
    aliases, users = {value}, set()
    stack = [value]
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or user.meta["phase"] == "update" or aliases.intersection(mutated(user)):
                return None
            if is_alias(user) and user.meta["phase"] == "forward":
                if user not in aliases:
                    aliases.add(user)
                    stack.append(user)
            else:
                users.add(user)
    readers = sorted((user for user in users if user.meta["phase"] != "forward"), key=order.__getitem__)
    forward = [*aliases, *(user for user in users if user.meta["phase"] == "forward")]
    return Kept(value, aliases, max(forward, key=order.__getitem__), readers) if readers else None


def _has_own_memory(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or node.meta["phase"] != "forward" or not isinstance(value, torch.Tensor):
        return False
    part = is_view(node) if node.target is getitem else is_alias(node)
    return _is_dense(value) and not part and not mutated(node) and role_of(node) is None


def _is_dense(value: torch.Tensor) -> bool:
    """Whether its elements, in some order, lie end to end; False for sizes that move."""
    if value.layout != torch.strided or not all(type(size) is int for size in (*value.shape, *value.stride())):
        return False
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride()) if size != 1):
        if stride != reach:
            return False
        reach *= size
    return True


def storable(program: Program, plan: Plan, again: Mapping[str, Saved]) -> list[Saved]:
    """The values for which that is cheaper than to make them again, in the order in which forward is done with them.

    ``again``: what can be made again, by what has the memory; before `recompute` has run.
    """
    order = positions(program.graph)
    done, now = {}, 0.0
    for node in program.graph.nodes:
        now += seconds(node, plan.machine)
        done[node] = now
    parameters = set().union(*gathered(program.graph).values())
    found = [one for node in program.graph.nodes if node not in parameters and (one := kept(node, order)) is not None]
    end = max((done[node] for node in order if node.meta.get("phase") == "forward"), default=0.0)
    free, chosen = 0.0, []
    for one in sorted(found, key=lambda one: order[one.last]):
        size = nbytes(one.value.meta["val"])
        copy = size / plan.machine.host
        arrived = max(free, done[one.last]) + copy
        cost = 2 * (LAUNCH + size / plan.machine.memory)
        if arrived > end or arrived + copy > done[one.readers[0]]:
            cost += 2 * copy
        other = again.get(base_of(one.value, parameters).name)
        if size > SMALL and (other is None or cost < other.seconds):
            free = min(arrived, end)
            chosen.append(Saved(one.name, size, cost, frozenset([one.name]), stored=True))
    return chosen
