"""What forward keeps for backward that could wait in host memory, and the cost of sending it there and back.

    compute    |== layers.0 ==|== layers.1 ==|== layers.2 ==| backward ...
    the link       |- a ------|- b -|     |- c ---------|                       a, b, c: hidden under compute
                                                     |- d ---|                  d: ends after forward, in the open

The link (`Cluster.host` bytes a second, in each direction) takes values in the order in which forward is done with
them. A value costs two launches and the traffic of two copies in device memory if its copy ends within forward and
backward does not need it before it could be back. The others cost the time there and back. That is so if all are sent;
if fewer are, more are hidden. A value that costs less to make again is left to that.

What forward keeps for backward, what it would cost to make each value again, and the cheapest choice of them.

    kept by forward     bytes      to make it again
    layers.0 up         2.0 MiB    a matrix product from the norm, itself from the block's input    1.2 ms
    layers.0 gelu       2.0 MiB    element-wise from the above                                      0.3 ms
    ...
    to be saved         3.1 MiB    -> the set that is as large, and cheapest: a knapsack

A value is made again from others that are kept. If one of those is made again as well, it is made again for both, and
the sum of the costs stays the same. What a block gets from the one before it is always kept, so that no chain leads
through the whole model. Only operators that give the same bits from the same inputs are run twice (`AGAIN`): never one
that is random, a collective, or one that writes.

To choose by a knapsack over the graph's saved values is the idea of PyTorch's partitioner under
``torch._functorch.config.activation_memory_budget``. Checkmate (Jain et al., MLSys 2020), which also schedules, has the
idea that recomputation is a question of cost under a budget, and can be solved as an optimisation. The minimum cut
between what is free to compute again and what is not (`min_cut_rematerialization_partition`) is left out:
`rematerialize` is the part of it that costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from fsdp_compiled.analysis.roofline import flops, nbytes, seconds
from fsdp_compiled.ir.nodes import (
    base_of,
    gathered,
    is_alias,
    is_collective,
    is_random,
    is_view,
    mutated,
    positions,
    role_of,
)
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.units import innermost

AHEAD = 2  # copies to host memory under way, in each direction
LAUNCH = 1e-5  # seconds of compute's stream that a copy takes, however small


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
    """The values that are cheaper to send than to make again, in the order in which forward is done with them.

    ``again``: what can be made again, by the node that has the memory; before `recompute` has run.
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


aten = torch.ops.aten
STEPS = 2000  # the knapsack's capacity is cut into so many parts
SMALL = 1024  # bytes: not worth an operator
CHEAP = (  # bound by memory traffic: `rematerialize` repeats these, and what maps elements
    aten.native_layer_norm.default,
    aten.mean.dim,
    aten.var_mean.correction,
    aten.cat.default,
    aten.stack.default,
    aten.clone.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
)
AGAIN = (
    *CHEAP,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.embedding.default,
    getitem,
)


@dataclass(frozen=True)
class Saved:
    """A value that backward reads. ``nodes``: the names of those that are repeated to make it again; ``seconds``: their
    estimated time; ``stored``: whether it waits in host memory instead (`storable`)."""

    name: str
    nbytes: int
    seconds: float
    nodes: frozenset[str]
    stored: bool = False


def saved_values(program: Program, plan: Plan) -> list[Saved]:
    """The values that forward keeps and that can be made again, in forward's order; before `recompute` has run."""
    graph = program.graph
    parameters = set().union(*gathered(graph).values())
    forward = [node for node in graph.nodes if node.op == "call_function" and node.meta["phase"] == "forward"]
    later = {node for node in graph.nodes if node.op == "call_function" and node.meta["phase"] != "forward"}
    crossing = [node for node in forward if not later.isdisjoint(node.users) and node not in parameters]
    kept: dict[fx.Node, list[fx.Node]] = {}  # by the node that has the memory: what of it backward reads
    for node in crossing:
        kept.setdefault(base_of(node, parameters), []).append(node)
    leaving = {base_of(node, parameters) for node in graph.output_node().all_input_nodes}
    blocks = {path: innermost([path], plan.blocks) for path in {node.meta.get("path", "") for node in forward}}
    inputs = {node for node in kept if node in leaving or _is_block_input(node, parameters, blocks)}
    found = []
    for base, reads in kept.items():
        size = _bytes_kept(base, reads)
        if base.op != "call_function" or base in inputs or size <= SMALL:
            continue
        chain = _chain([base, *reads], kept, parameters)
        if chain is not None:
            cost = sum(seconds(node, plan.machine) for node in chain)
            found.append(Saved(base.name, size, cost, frozenset(node.name for node in chain)))
    return found


def cheapest(values: Sequence[Saved], wanted: int) -> list[Saved]:
    """Chooses values of ``wanted`` bytes together, or more, at the least cost; all of them if that is not enough.

    It is solved for what may be *kept*: the dearest values that fit into the bytes that are left, in `STEPS` parts.
    """
    room = sum(value.nbytes for value in values) - wanted
    if room <= 0:
        return list(values)
    unit = max(room / STEPS, 1.0)
    capacity = int(room // unit)
    best = [0.0] * (capacity + 1)
    taken: list[set[int]] = []  # by value: at which capacities it is kept
    for value in values:
        weight = -int(-value.nbytes // unit)  # rounded up: what is kept never takes more than there is
        mine = set()
        for left in range(capacity, weight - 1, -1):
            if best[left - weight] + value.seconds > best[left]:
                best[left] = best[left - weight] + value.seconds
                mine.add(left)
        taken.append(mine)
    left, dropped = capacity, []
    for value, mine in zip(reversed(values), reversed(taken), strict=True):
        if left in mine:
            left -= -int(-value.nbytes // unit)
        else:
            dropped.append(value)
    return dropped[::-1]


def _bytes_kept(base: fx.Node, reads: Sequence[fx.Node]) -> int:
    """The bytes of those results of an operator that backward reads."""
    if not isinstance(base.meta.get("val"), tuple | list):
        return nbytes(base.meta.get("val"))
    return sum(nbytes(node.meta["val"]) for node in reads if node.target is getitem)


def _is_block_input(base: fx.Node, parameters: set[fx.Node], blocks: dict[str, str | None]) -> bool:
    """Whether forward reads it, or a view of it, in another block than its own."""
    own = blocks.get(base.meta.get("path", ""))
    stack, seen = [base], {base}
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or user.meta["phase"] != "forward" or user in seen:
                continue
            if blocks.get(user.meta.get("path", "")) != own:
                return True
            if is_alias(user):
                seen.add(user)
                stack.append(user)
    return False


def _chain(
    wanted: Sequence[fx.Node], kept: dict[fx.Node, list[fx.Node]], parameters: set[fx.Node]
) -> set[fx.Node] | None:
    """The forward nodes that make these from kept values and parameters; None if one of them must not be run twice."""
    found: set[fx.Node] = set()
    target = base_of(wanted[0], parameters)
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in found or node.op != "call_function" or node in parameters:
            continue
        if not isinstance(node.meta["val"], torch.Tensor | tuple | list):
            return None  # a size that moves
        base = base_of(node, parameters)
        if base is not target and base in kept:
            if node is base or node in kept[base]:
                continue  # it is there
            if is_alias(node):
                found.add(node)
                stack += node.all_input_nodes
            continue
        if not (is_alias(node) or _may_run_again(node)):
            return None
        found.add(node)
        stack += node.all_input_nodes
    return found


def _may_run_again(node: fx.Node) -> bool:
    if not same_again(node):
        return False
    if node.target in AGAIN:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or flops(node) > 0


def same_again(node: fx.Node) -> bool:
    """Whether it is the model's own, and gives the same bits if it runs twice."""
    return role_of(node) is None and not (is_collective(node) or is_random(node) or mutated(node))
