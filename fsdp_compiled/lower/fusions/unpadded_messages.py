"""Between two ranks of CPUs, slices that end in padding are sent without it.

    before                                           after

    full = all_gather(shard, 2)                      full = pairs.all_gather(shard, [6, 4], 2)
    part = reduce_scatter(flat, "avg", 2)            part = pairs.reduce_scatter(flat, "avg", [6, 4], 2)

Where each rank's slice holds whole parameters (`plan.owners`), slices are of one length for their padding alone, of
which both ranks know that it is zero. There a message is of any length (`distributed.gloo_pairs`), and what comes out
has the same shape and values, bit for bit.
"""

from __future__ import annotations

from torch import fx

from fsdp_compiled.distributed.gloo_gathers import UNPADDED
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan


def unpadded_messages(program: Program, plan: Plan) -> Program:
    """The fusion, for collectives that carry what is set apart."""
    edit = Edit(program)
    for padded, unpadded in UNPADDED.items():
        for node in edit.graph.find_nodes(op="call_function", target=padded):
            if node.args[-1] == "shard" and (filled := _filled(node, plan)):
                node.target, node.args = unpadded, (*node.args[:-2], filled, *node.args[-2:])
                edit.infer(node)
    return edit.done("unpadded_messages")


def _filled(collective: fx.Node, plan: Plan) -> list[int]:
    """Of each buffer that it carries, and each rank, what comes before padding; nothing if there is none."""
    parts = [user for user in collective.users if role_of(user) == "part"]
    parts.sort(key=lambda part: part.args[1])  # type: ignore[arg-type, return-value]
    keys = [mark.buffer if (mark := node.meta.get("mark")) else "" for node in parts or [collective]]
    if plan.filled.keys().isdisjoint(keys):
        return []
    each = [plan.buffer(key).numel // plan.shard for key in keys]
    return [one for key, size in zip(keys, each, strict=True) for one in plan.filled.get(key, (size, size))]
