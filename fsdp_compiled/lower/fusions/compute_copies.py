"""Gathers from copies of shards that are kept in the compute dtype, without a cast.

    before                                  after

    half: bfloat16[36] = cast(shard)        full = all_gather(copy)       # copy: bfloat16[36], of the last update
    full = all_gather(half)                 ...
    ...                                     full' = all_gather(copy)
    half' = cast(shard)                     ...
    full' = all_gather(half')               shard.addcdiv_(exp_avg, ...)
    shard.addcdiv_(exp_avg, ...)            copy.copy_(shard)

`fsdp_compiled.runtime.state` tracks other writers of a shard. Only the programs that train read copies: for forward
alone, or a gradient alone, the gain is not worth relying on them.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, last, mutated, positions, role_of, versions
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.plan.plan import Buffer, Plan

aten = torch.ops.aten


def compute_copies(program: Program, plan: Plan) -> Program:
    """Replaces casts of such a shard by its copy, an input, and writes the copy again after the update."""
    edit = Edit(program)
    for buffer in plan.buffers:
        if plan.copied(buffer):
            shard = edit.inputs[Port("in", "shard", buffer.key)]
            casts = [user for user in shard.users if role_of(user) == "cast"]
            if casts:
                copy = edit.add_input(Port("in", "copy", buffer.key), casts[0].meta["val"])
                for cast in casts:
                    cast.replace_all_uses_with(copy)
                _write(edit, buffer, shard, copy)
    return edit.done("compute_copies")


def _write(edit: Edit, buffer: Buffer, shard: fx.Node, copy: fx.Node) -> None:
    memory = versions(shard)
    writes = [user for node in memory for user in node.users if set(mutated(user)).intersection(memory)]
    if writes:
        with edit.at(last(writes, positions(edit.graph)).next, "update"):
            edit.call(aten.copy_.default, copy, shard, mark=Mark("update", buffer.unit, buffer.key, "copy"))
