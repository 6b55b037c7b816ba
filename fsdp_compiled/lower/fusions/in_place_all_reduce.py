"""Makes an all-reduce write into its input, where nothing reads the input afterwards.

    before                                  after

    sum = all_reduce(flat, "avg", "shard")  sum = all_reduce_(flat, "avg", "shard")
    gradient = wait(sum)                    gradient = wait(sum)

PyTorch's functional ``all_reduce`` copies its input and reduces the copy: one read and one write of a whole gradient on
the stream of compute (`Functional.cpp`), and its memory twice while both are there. NCCL's and gloo's own all-reduces
are in place.

Not so for memory that the program was given, for what is no contiguous stretch of numbers, and where anything that has
the memory of the input is read later, or by what may still be reading then: a collective, or a copy to the host. Nor
along tp, where ranks may have parts of other shapes, of which one is contiguous and another is not.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_alias, is_collective, is_wait, mutated, origin, positions, role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

c10d = torch.ops._c10d_functional


def in_place_all_reduce(program: Program, plan: Plan) -> Program:
    """The fusion: of gradients, and of what ranks report."""
    edit = Edit(program)
    order = positions(edit.graph)
    for node in edit.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if node.args[-1] != "tp" and _is_last(node, order):
            node.target = c10d.all_reduce_.default
            edit.infer(node)
    return edit.done("in_place_all_reduce")


def _is_last(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether the all-reduce may write its input."""
    given: fx.Node = node.args[0]  # type: ignore[assignment]
    value = given.meta["val"]
    made_of = _in_memory_of(given)
    if made_of[-1].op != "call_function" or not value.is_contiguous() or value.is_complex():
        return False
    stack = [made_of[-1]]
    for one in stack:
        for user in one.users:
            if is_wait(user) or is_alias(user) or one in mutated(user):
                stack.append(user)
            if user is node or is_wait(user) or user in made_of:
                continue
            if user not in order or order[user] > order[node] or is_collective(user) or role_of(user) == "store":
                return False
    return True


def _in_memory_of(node: fx.Node) -> list[fx.Node]:
    """The value, and what it is a view, the awaited result or the next version of, back to what made its memory."""
    found = [node]
    while (node := found[-1]).op == "call_function":
        if is_alias(node) or is_wait(node):
            found.append(node.all_input_nodes[0])
        elif (written := origin(node)) is not node:
            found.append(written)
        else:
            break
    return found
