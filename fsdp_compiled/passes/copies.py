"""Shards that are kept in the compute dtype as well are gathered from there, without a cast.

    before                                  after

    half: bfloat16[36] = cast(shard)        full = all_gather(copy)       # copy: bfloat16[36], of the last update
    full = all_gather(half)                 ...
    ...                                     full' = all_gather(copy)
    half' = cast(shard)
    full' = all_gather(half')

The update writes the copy while it has the new values at hand, see `update`; whoever else writes a shard is followed by
`fsdp_compiled.runtime.compute_copies`. Only the programs that train read copies: to run forward alone, or to
differentiate, is not worth relying on them.
"""

from __future__ import annotations

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import role_of
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.plan.plan import Plan


def copies(program: Program, plan: Plan) -> Program:
    """Makes what reads a cast of such a shard read its copy, an input, and leaves out the cast."""
    edit = Edit(program)
    for buffer in plan.buffers:
        if plan.copied(buffer):
            shard = edit.inputs[Port("in", "shard", buffer.key)]
            casts = [user for user in shard.users if role_of(user) == "cast"]
            if casts:
                copy = edit.add_input(Port("in", "copy", buffer.key), casts[0].meta["val"])
                for cast in casts:
                    cast.replace_all_uses_with(copy)
    return edit.done("copies")
