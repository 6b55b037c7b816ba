"""The linear head whose logits become a loss row by row: what is made from them, and where that ends
(`passes.slice_loss`).

Beside the logits of a slice, forward also makes the values of backward that are not by row. Most are constants, masks
and targets; these are repeated where they are needed. The derivative by the loss may be made from the loss, or come
from outside. Then all of it is a multiple of one number, the root. 1 is put in the root's place, and gradients, each of
which must be a multiple of it too, are multiplied by it where it is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from fsdp_compiled.analysis.logit_rows import (
    LIKE,
    MOVES,
    NEW,
    NLL,
    NLL_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    ZERO_AT,
    Layout,
    is_pointwise,
    layout,
    shape_of,
)
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_random, mutated, positions
from fsdp_compiled.ir.program import Port

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
NONE, MEAN, SUM = 0, 1, 2  # the reduction of ``nll_loss``


class Unlike(Exception):
    """Why a loss cannot be made in slices."""


def product_of(graph: fx.Graph, ports: Iterable[Port]) -> fx.Node:
    """The head's product, whose logits a cross-entropy reads."""
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
    """Goes back through operators that keep all classes of a row."""
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
    """What is made from the logits, by row, and where it ends.

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
        self.sinks: dict[fx.Node, fx.Node] = {}  # each with the gradient that it reads
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
        """Whether it is a sum over all rows, and maybe over classes."""
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


# The result is a multiple of the first argument.
SAME = (
    *MOVES, aten.expand.default, aten._to_copy.default, aten.neg.default, aten.sum.dim_IntList, aten.mean.dim,
    aten.sum.default, aten.gather.default, aten.mul.Scalar, aten.div.Scalar,
)  # fmt: skip
EITHER = (aten.add.Tensor, aten.sub.Tensor)


class EarlyValues:
    """Repeats what stands from ``begin`` on. ``known``: what is made by row; ``losses``: the losses made of it."""

    def __init__(self, edit: Edit, known: Collection[fx.Node], losses: Collection[fx.Node], begin: fx.Node) -> None:
        self.edit, self.by_row = edit, {*known, *losses}
        self.outside = {node for port, node in edit.inputs.items() if port.kind == "tangent"}
        self.order = positions(edit.graph)
        self.begin = self.order[begin]
        self._unknown: dict[fx.Node, bool] = {}
        self._copies: dict[fx.Node, fx.Node] = {}

    def __call__(self, node: Any) -> fx.Node:
        """This value, at the place where calls are written."""
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            one = stack.pop()
            if one in self._copies or one in needed or not self._is_later(one):
                continue
            if one in self.by_row or one in self.outside or is_random(one) or mutated(one):
                raise Unlike(f"more than sums and constants is made of the loss afterwards ({one.name})")
            needed.add(one)
            stack += one.all_input_nodes
        for one in sorted(needed, key=self.order.__getitem__):
            self._copies[one] = self.edit.clone(one, self._copies)
        return self._copies.get(node, node)

    def _is_later(self, node: fx.Node) -> bool:
        return node in self.outside or (node.op == "call_function" and self.order[node] >= self.begin)

    def is_unknown(self, node: fx.Node) -> bool:
        """Whether it is made from the loss, or comes from outside."""
        stack = [node]
        while stack:
            one = stack[-1]
            if one in self.by_row or one in self.outside:
                self._unknown[one] = True
            elif not self._is_later(one):
                self._unknown[one] = False
            elif missing := [inner for inner in one.all_input_nodes if inner not in self._unknown]:
                stack += missing
                continue
            else:
                self._unknown[one] = any(self._unknown[inner] for inner in one.all_input_nodes)
            stack.pop()
        return self._unknown[node]

    def root(self, made: Iterable[fx.Node], sinks: Iterable[fx.Node], exits: Iterable[fx.Node]) -> fx.Node | None:
        """The number, not known yet, of which gradients are multiples; from now on 1 stands for it."""
        read = [(node, _operands(node)) for node in made]
        unknown = [one for _, given in read for one in given if one not in self.by_row and self.is_unknown(one)]
        roots = dict.fromkeys(map(self._root_of, unknown))
        if not roots:
            return None
        if len(roots) > 1:
            raise Unlike("more than sums and constants is made of the loss afterwards")
        (root,) = roots
        degrees: dict[fx.Node, int | None] = dict.fromkeys(unknown, 1)
        for node, _ in read:
            degrees[node] = _degree(node, degrees)
        if any(degrees.get(node) == 0 for node in sinks) or any(degrees.get(node) for node in exits):
            raise Unlike("a part of its gradient is made of the loss, and a part is not")
        value = root.meta["val"]
        self._copies[root] = self.edit.call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
        return root

    def _root_of(self, node: fx.Node) -> fx.Node:
        """The number that this is a multiple of, as far back as can be told."""
        while True:
            of = [one for one in node.all_input_nodes if self.is_unknown(one)]
            multiple = node.target in SAME or node.target is aten.mul.Tensor or node.target is aten.div.Tensor
            first = node.target is aten.mul.Tensor or node.args[:1] == tuple(of)
            if node.op != "call_function" or not multiple or len(of) != 1 or not first or node.args.count(of[0]) != 1:
                break
            if of[0] in self.by_row:
                break
            node = of[0]
        if node.meta["val"].dim():
            raise Unlike("more than sums and constants is made of the loss afterwards")
        return node


def _operands(node: fx.Node) -> list[fx.Node]:
    """Its operands, without a mean's divisor, which is counted anew, and without what is the loss's own."""
    if node.target is NLL_BACKWARD:
        return [one for one in node.args[:4] if isinstance(one, fx.Node)]
    return [one for one in node.all_input_nodes if one.target is not NLL]


def _degree(node: fx.Node, degrees: dict[fx.Node, int | None]) -> int | None:
    """How it depends on the root. 0: not at all; 1: it is a multiple of the root; None: it is zero."""
    given = [degrees.get(one, 0) if isinstance(one, fx.Node) else 0 for one in node.args]
    target = node.target
    if target in LIKE or target in NEW:
        return None
    if not any(given):
        return None if given and given[0] is None and target in SAME else 0
    first = target in (NLL_BACKWARD, *SOFTMAX_BACKWARD) or target in ZERO_AT
    if target in SAME or (first and not any(given[1:])):
        return given[0]
    if target is aten.mul.Tensor and None not in given and sum(one or 0 for one in given) == 1:
        return 1
    if target in EITHER and len({one for one in given[:2] if one is not None}) == 1:
        return 1
    if target is aten.scatter_add.default and given[0] in (None, given[3]):
        return given[3]
    if target is aten.where.self and not given[0] and len({one for one in given[1:] if one is not None}) == 1:
        return 1
    if target is aten.masked_fill.Scalar and node.args[2] == 0:
        return given[0]
    raise Unlike("more than sums and constants is made of the loss afterwards")
