"""The linear head whose logits become a loss row by row: what is made of them, and where that ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fsdp_compiled.analysis.logit_rows import MOVES, NLL, SOFTMAX, Layout, is_pointwise, layout, shape_of
from fsdp_compiled.ir.program import Port

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
NONE, MEAN, SUM = 0, 1, 2  # the reduction of ``nll_loss``


class Unlike(Exception):
    """Why a loss cannot be made in slices."""


def product_of(graph: fx.Graph, ports: Iterable[Port]) -> fx.Node:
    """The head's, whose logits a cross-entropy reads."""
    losses = graph.find_nodes(op="call_function", target=NLL)
    found = dict.fromkeys(_made_by(node.args[0]) for node in losses)
    if len(found) != 1:
        inside = any(port.kind == "result" for port in ports)
        where = "the model's forward, which is to return the loss," if inside else "the loss"
        raise Unlike(f"{where} has {len(found) or 'no'} calls of cross_entropy on classes")
    (product,) = found
    if product.target not in PRODUCTS or product.kwargs:
        raise Unlike(f"its logits are made by {product.target}, not by a linear layer")
    return product


def _made_by(node: Any) -> fx.Node:
    """Back through what keeps all classes of a row."""
    classes = shape_of(node)[-1]
    while node.target not in PRODUCTS:
        wide = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)
                and shape_of(one)[-1:] == (classes,) and len(shape_of(one)) > 1]  # fmt: skip
        known = node.target in (*MOVES, *SOFTMAX) or is_pointwise(node.target)
        if not known or not wide:
            return node  # type: ignore[no-any-return]
        node = wide[0]
    return node  # type: ignore[no-any-return]


class Head:
    """What is made of the logits, by row, and where it ends.

    known     each value that is made by row, with its rows
    losses    the calls of ``nll_loss``
    sinks     sums over rows of the gradient, and products with it
    chosen    the rows that the loss reads, in its order, from 1
    """

    def __init__(self, graph: fx.Graph, product: fx.Node) -> None:
        self.product = product
        shape = shape_of(product)
        if not all(isinstance(size, int) for size in shape):
            raise Unlike("the number of rows moves (Policy.dynamic)")
        self.classes = shape[1]
        if self.classes == 1:
            raise Unlike("it has one class")
        self.hidden: Any = product.args[-2]
        self.known = {product: Layout(torch.arange(1, shape[0] + 1), self.classes)}
        self.losses: list[fx.Node] = []
        self.sinks: dict[fx.Node, fx.Node] = {}  # with the gradient that each reads
        self.exits: dict[fx.Node, None] = {}
        for node in list(graph.nodes):
            if node is not product and any(one in self.known for one in node.all_input_nodes):
                self._read(node)
        self.chosen = self.known[self.losses[0].args[0]].rows.flatten()  # type: ignore[index]
        self._check_rows()

    def _read(self, node: fx.Node) -> None:
        read = [one for one in node.all_input_nodes if one in self.known]
        if node.target is NLL and node.args[0] is read[0]:
            self.losses.append(node)
            if node.args[3] == NONE:
                self.known |= {one: Layout(self.known[read[0]].rows, None) for one in node.users if one.args[1] == 0}
        elif (found := layout(node, self.known, self.classes)) is not None:
            self.known[node] = found
        elif node.target is aten.t.default and self.known[read[0]].last == self.classes:
            self.sinks |= dict.fromkeys(node.users, read[0])
            if not all(self._is_weight(user, node) for user in node.users):
                raise Unlike("its weight's gradient is made of other rows")
        elif self._is_product(node, read[0]) or self._is_sum(node, self.known[read[0]]):
            self.sinks[node] = read[0]
        elif all(self.known[one].last != self.classes for one in read):
            self.exits |= dict.fromkeys(read)
        elif node.op == "output" or node.meta["phase"] == "forward":
            raise Unlike(f"its logits are used elsewhere as well, by {node.target}")
        else:
            raise Unlike(f"the gradient of its logits goes into {node.target}")

    def _is_weight(self, product: fx.Node, turned: fx.Node) -> bool:
        return product.target is aten.mm.default and product.args == (turned, self.hidden)

    def _is_product(self, node: fx.Node, of: fx.Node) -> bool:
        if node.target is not aten.mm.default:
            return False
        turned: Any = node.args[0]
        return turned is of or (turned.target is aten.t.default and turned.args[0] is self.hidden)

    def _is_sum(self, node: fx.Node, of: Layout) -> bool:
        """Over all rows, and maybe over classes."""
        if of.last != self.classes or (node.meta.get("phase") != "backward"):
            return False
        if node.target is aten.sum.default:
            return True
        rank = of.rows.dim()
        dims = {dim % (rank + 1) for dim in node.args[1]} if node.target is aten.sum.dim_IntList else set()  # type: ignore[union-attr]
        return dims >= set(range(rank))

    def _check_rows(self) -> None:
        chosen = self.chosen
        if not bool(chosen.all()) or len(chosen.unique()) != len(chosen):
            raise Unlike("the loss reads a row of logits twice")
        if any(not self.known[node.args[0]].of(chosen) for node in self.losses):  # type: ignore[index]
            raise Unlike("its logits are read at other rows as well")
        if any(not self.known[node].of(chosen) for node in self.exits):
            raise Unlike("its logits are read at other rows as well")
        there = torch.zeros(len(self.known[self.product].rows) + 1, dtype=torch.int64)
        there[chosen] = chosen
        for node, gradient in self.sinks.items():
            rows = self.known[gradient].rows.flatten()
            if not torch.equal(rows[rows > 0].sort().values, chosen.sort().values):
                raise Unlike("its gradient is made of other rows")
            if node.target is aten.mm.default and not torch.equal(rows, there[1:]):
                raise Unlike("its gradient lies in another order")

    @property
    def cut(self) -> bool:
        """Whether the loss leaves rows out, or has them in another order."""
        return not self.known[self.product].of(self.chosen)
