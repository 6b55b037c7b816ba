"""Recomputes in backward what forward does not keep: gathered parameters, checkpointed regions, whole blocks if asked.

    before                              after

    full = all_gather(shard)            full = all_gather(shard)
    weight_t = t(view(full))            weight_t = t(view(full))
    y = mm(x, weight_t)                 y = mm(x, weight_t)       # full is freed here
    ...                                 ...
    d_x = mm(d_y, t(weight_t))          full' = all_gather(shard)
                                        weight_t' = t(view(full'))
                                        d_x = mm(d_y, t(weight_t'))

Resharding after forward is nothing but this: backward runs the gather again, with the whole chain of views and casts
behind it. The unit that forward uses last and backward first is kept: it would be gathered twice in a row.

A unit that is resharded onto a part of the ranks (``reshard_after_forward=8``) stays cut over these neighbours, as
ranks of one node, until backward, which gathers among them alone:

    full = wait(all_gather(shard, 16, "shard"))          full = wait(all_gather(shard, 16, "shard"))
    y = use(full)                                        kept = full.view(8, -1)[rank % 8]
    ...                                                  y = use(full)
    full' = wait(all_gather(shard, 16, "shard"))         full' = wait(all_gather(kept, 8, "each 8 ranks"))

So bytes cross the slow network once for parameters and once for gradients, as with replicas by node, and shards and
optimizer state are cut over all ranks: ZeRO++'s hpZ (Wang et al., 2023, https://arxiv.org/abs/2306.10209). Backward
runs a checkpointed region (`torch.utils.checkpoint`) again from its inputs, except its random operators: their results
are kept, so that dropout replays the same mask. Under ``Policy.recompute = "unit"`` every block is a region: forward
keeps only the block's input for backward, and nothing that the block computes.

`recompute_saved` recomputes chosen saved values in backward, so that a step fits its memory:

    before                                after, for ``{"gelu_3"}``

    u = mm(x, up)                         u = mm(x, up)
    gelu_3 = gelu(u)                      gelu_3 = gelu(u)              # freed after its last use in forward
    ...                                   ...
    d_down = mm(t(gelu_3), d_y)           gelu_3' = gelu(u)
                                          d_down = mm(t(gelu_3'), d_y)

`runtime.programs.memory_budget` chooses the values (`analysis.saved_values`). `recompute_saved` runs before
`recompute`, which then gathers again the parameters that the repeated nodes read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from operator import getitem

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, gathered, is_random, positions, role_of, waits_for
from fsdp_compiled.ir.program import RANK, Program
from fsdp_compiled.plan.plan import Plan, axis_of
from fsdp_compiled.plan.units import innermost

aten = torch.ops.aten


def recompute(program: Program, plan: Plan) -> Program:
    """Moves nothing; repeats forward nodes in backward, each just before its first use there."""
    regions = _regions(program.graph, plan)
    if not plan.resharded and not regions:
        return program.after("recompute")
    edit = Edit(program)
    if regions:
        edit.rebuild(_inside(edit.graph, _regions(edit.graph, plan)))
    if plan.resharded:
        chains = gathered(edit.graph)
        kept = _turning_unit(edit.graph, chains)
        again = plan.resharded - {kept}
        clones = edit.rebuild({node for unit, nodes in chains.items() if unit in again for node in nodes})
        _gather_among_neighbours(edit, plan, clones)
        edit.drop_unused_parts()
    return edit.done("recompute")


def _gather_among_neighbours(edit: Edit, plan: Plan, clones: Mapping[fx.Node, fx.Node]) -> None:
    """Keeps this rank's part of each unit that is cut over neighbours after forward, and gathers it in backward.
    ``clones``: backward's gathers, by forward's."""
    places: dict[int, fx.Node] = {}  # this rank's among so many neighbours
    for gather, again in clones.items():
        if role_of(gather) != "gather" or (ranks := plan.neighbours.get(gather.meta["mark"].unit)) is None:
            continue
        waits = waits_for(gather)
        if not any(user.op == "call_function" for wait in waits for user in wait.users):
            continue  # forward has no use for it, and gathers nothing
        if ranks not in places:
            rank = edit.input(RANK, [1], torch.int64, plan.device)
            with edit.at(next(node for node in edit.graph.nodes if node.op == "call_function"), "forward"):
                places[ranks] = edit.call(aten.remainder.Scalar, rank, ranks, mark=Mark("kept"))
        kept = []
        for wait in waits:
            own = replace(wait.meta["mark"], role="kept")
            with edit.at(wait.next, "forward"):
                rows = edit.call(aten.view.default, wait, [ranks, wait.meta["val"].numel() // ranks], mark=own)
                row = edit.call(aten.index_select.default, rows, 0, places[ranks], mark=own)
                kept.append(edit.call(aten.view.default, row, [row.meta["val"].numel()], mark=own))
        several = isinstance(gather.args[0], list | tuple)
        again.args = (kept if several else kept[0], ranks, axis_of(ranks))


def _turning_unit(graph: fx.Graph, chains: dict[str, set[fx.Node]]) -> str | None:
    """The unit that forward uses last and backward first, if that is one and the same."""
    order = positions(graph)
    last_forward: dict[str, int] = {}
    first_backward: dict[str, int] = {}
    for unit, nodes in chains.items():
        users = {user for node in nodes for user in node.users if user not in nodes and user.op == "call_function"}
        forward = [order[user] for user in users if user.meta["phase"] == "forward"]
        backward = [order[user] for user in users if user.meta["phase"] == "backward"]
        if forward:
            last_forward[unit] = max(forward)
        if backward:
            first_backward[unit] = min(backward)
    if not last_forward or not first_backward:
        return None
    turn = max(last_forward, key=last_forward.__getitem__)
    return turn if turn == min(first_backward, key=first_backward.__getitem__) else None


def _regions(graph: fx.Graph, plan: Plan) -> dict[fx.Node, object]:
    """The region of each node that is in one: what the model checkpoints or, if asked, the node's block."""
    if plan.policy.recompute != "unit":
        return {node: region for node in graph.nodes if (region := node.meta.get("region")) is not None}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    blocks = {path: innermost([path], plan.blocks) for path in {node.meta.get("path", "") for node in nodes}}
    found = {node: blocks.get(node.meta.get("path", "")) or node.meta.get("region") for node in nodes}
    return {node: region for node, region in found.items() if region is not None}


def _inside(graph: fx.Graph, regions: Mapping[fx.Node, object]) -> set[fx.Node]:
    """The forward nodes in regions that backward may compute again.

    Inputs of other regions are kept, and so are values that backward reads outside of the region. For a region that the
    model checkpoints, whose backward is not known by name, every result is kept.
    """

    def private(user: fx.Node, region: object) -> bool:
        if user.op != "call_function":
            return False
        if regions.get(user) == region:
            return True
        if isinstance(region, str):  # a block: its backward is part of it
            return user.meta["phase"] == "forward" and user not in regions
        return user.meta["phase"] == "backward"

    return {
        node
        for node, region in regions.items()
        if node.meta["phase"] == "forward" and not _drawn(node) and all(private(user, region) for user in node.users)
    }


def _drawn(node: fx.Node) -> bool:
    """Whether the node is a random operator or one of its results."""
    return is_random(node) or (node.target is getitem and is_random(node.args[0]))  # type: ignore[arg-type]


def recompute_saved(names: Collection[str]) -> Callable[[Program, Plan], Program]:
    """The pass for forward nodes of these names: backward reads repetitions of them."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        edit.rebuild({node for node in edit.graph.nodes if node.name in names})
        return edit.done("recompute_saved")

    return transform
