"""Values that are cheap to make again are not kept for backward; what they are made from is kept anyway.

    before                              after

    u = mm(x, up)                       u = mm(x, up)
    a = gelu(u)                         a = gelu(u)               # freed after its last use in forward
    y = mm(a, down)                     y = mm(a, down)
    ...                                 ...
    d_down = mm(t(a), d_y)              a' = gelu(u)
    d_u = gelu_backward(d_a, u)         d_down = mm(t(a'), d_y)
                                        d_u = gelu_backward(d_a, u)

Autograd keeps both ``u`` and ``a``. Cheap are operators that map elements, copies, views, and normalisations, all bound
by memory traffic; under Inductor they fuse with their readers. Matrix products, convolutions, attention and random
numbers are never computed again. For a cast to a wider dtype, such as a norm's cast of a residual in bfloat16, the
input of the cast is kept instead, for half the bytes. The idea, without its minimum cut, is that of AOTAutograd's
min_cut_rematerialization_partition.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.analysis.roofline import nbytes
from fsdp_compiled.analysis.saved_values import CHEAP, SMALL, same_again
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import base_of, gathered, is_alias, is_collective
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def rematerialize(program: Program, plan: Plan) -> Program:
    """Makes backward read repetitions of forward's cheap values, each just before its first use there."""
    edit = Edit(program)
    edit.rebuild(_Choice(edit.graph).nodes)
    return edit.done("rematerialize")


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"], int | torch.SymInt)


def _is_cheap(node: fx.Node) -> bool:
    if node.meta["phase"] != "forward" or not isinstance(node.target, torch._ops.OpOverload) or not same_again(node):
        return False
    return node.target in CHEAP or torch.Tag.pointwise in node.target.tags


class _Choice:
    """Chooses the forward nodes that backward computes again, in forward's order.

    *Kept*: what backward reads and does not compute again, parameters and inputs. A node is computed again if all its
    sources are kept, or are cheap and made of what is kept.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.parameters = set().union(*gathered(graph).values())
        self.leaving = {base_of(node, self.parameters) for node in graph.output_node().all_input_nodes}
        forward = [node for node in graph.nodes if node.op == "call_function" and node.meta["phase"] == "forward"]
        crossing = [node for node in forward if any(user.meta.get("phase") == "backward" for user in node.users)]
        self.read = {base_of(node, self.parameters) for node in crossing}
        self.again: set[fx.Node] = set()  # bases that backward computes again
        self.nodes: set[fx.Node] = set()
        for node in forward:
            if (
                node in self.read
                and not is_alias(node)
                and node not in self.leaving
                and nbytes(node.meta["val"]) > SMALL
            ):
                if self._widens(node):
                    self.read.add(base_of(node.all_input_nodes[0], self.parameters))
                made = self._made_of(node)
                if made is not None:
                    self.again.add(node)
                    self.nodes |= made
        self.nodes |= {node for node in crossing if is_alias(node) and base_of(node, self.parameters) in self.again}
        self._complete()

    def _widens(self, node: fx.Node) -> bool:
        """Whether the value is a cast of one that takes less memory and is not made again either."""
        if node.target is not aten._to_copy.default or not _is_cheap(node):
            return False
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        base = base_of(source, self.parameters)
        computed = base.op == "call_function" and base not in self.parameters and not is_collective(base)
        return computed and self._available(source) is None and nbytes(base.meta["val"]) < nbytes(node.meta["val"])

    def _made_of(self, node: fx.Node) -> set[fx.Node] | None:
        """The nodes to repeat for this one, itself included; None where that takes nodes that are not cheap."""
        if not _is_cheap(node):
            return None
        found = {node}
        for source in node.all_input_nodes:
            more = self._available(source)
            if more is None:
                return None
            found |= more
        return found

    def _available(self, node: fx.Node) -> set[fx.Node] | None:
        """The nodes to repeat so that backward can read this node: none, where it is kept."""
        if node.op != "call_function" or node in self.parameters or not _is_tensor(node):
            return set()
        base = base_of(node, self.parameters)
        if base.op != "call_function" or base in self.leaving or base in self.parameters:
            return set()
        if base in self.read and base not in self.again:
            return set()
        made = self._made_of(base)
        return None if made is None else made | self._aliases(node)

    def _aliases(self, node: fx.Node) -> set[fx.Node]:
        found = set()
        while node.op == "call_function" and is_alias(node) and node not in self.parameters:
            found.add(node)
            node = node.all_input_nodes[0]
        return found

    def _complete(self) -> None:
        """Adds the views between the recomputed nodes and their readers."""
        for node in list(self.nodes):
            self.nodes |= {alias for alias in self._aliases(node) if base_of(alias, self.parameters) in self.nodes}
