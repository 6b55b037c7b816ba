"""Computes the loss of a linear head some rows at a time: neither logits nor their gradient are ever whole.

    before, V classes                               after, for each slice of rows

    logits = addmm(bias, hidden, weight_t)  [N, V]  logits = addmm(bias, hidden[rows], weight_t)      [rows, V]
    log_p = log_softmax(logits)             [N, V]  log_p = log_softmax(logits)
    loss = nll_loss(log_p, targets)                 loss += nll_loss(log_p, targets[rows], "sum")
    ...                                             d_logits = log_softmax_backward(nll_loss_backward(log_p, d_loss))
    d_logits = ...                          [N, V]  d_hidden[rows] = mm(d_logits, weight)
    d_hidden = mm(d_logits, weight)                 d_weight += mm(t(d_logits), hidden[rows])
    d_weight = mm(t(d_logits), hidden)              d_bias += sum(d_logits)

Whatever is computed from the logits row by row (`analysis.loss_head`), in forward and backward, is computed from a
slice: scales, caps, shifts by a token, sums over classes. Results of one number a row are joined for all rows, and the
rest of the loss stays as it is. A slice's gradient is computed next to its loss, while its logits exist: no product is
computed twice. That needs the derivative by the loss before the loss is known. In a step this derivative is a constant,
or the loss scale's factor. Where it depends on the loss, or comes from outside (a model that returns its loss), the
slices use a derivative of 1, and backward multiplies the results by the true one: as exact, except in float16, where
small gradients would become zeros. A loss that is not recognised is refused: whoever asks for slices has no room for
the whole. Sums over slices are added in another order than before, in float32 at least.
"""

from __future__ import annotations

from operator import getitem
from typing import Any, NoReturn

import torch
from torch import fx

from fsdp_compiled.analysis.logit_rows import (
    COPIES,
    LIKE,
    MOVES,
    NEW,
    NLL,
    NLL_BACKWARD,
    OVER_CLASSES,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    Layout,
    is_pointwise,
    moves_back,
    replay,
    shape_of,
)
from fsdp_compiled.analysis.loss_head import MEAN, NONE, SUM, EarlyValues, Head, Unlike, product_of
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_random
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten


def slice_loss(program: Program, plan: Plan) -> Program:
    """Rewrites the one loss of the program; raises ``ValueError`` where there is none that can be."""
    rows = plan.policy.loss_rows
    assert rows is not None
    edit = Edit(program)
    try:
        head = Head(edit.graph, product_of(edit.graph, program.ports))
        count = Slices(edit, head, rows).write()
    except Unlike as error:
        _refuse(str(error), plan)
    return edit.done("slice_loss", f"loss_rows={rows}, as given: logits of {count} slices, [{rows}, {head.classes}]")


def _refuse(reason: str, plan: Plan) -> NoReturn:
    raise ValueError(
        f"Policy.loss_rows={plan.policy.loss_rows} cannot be: {reason}. It is for a linear head whose logits become a "
        "loss row by row. Leave loss_rows out, or call fsdp_compiled.chunked_cross_entropy."
    ) from None


class Slices:
    """Replaces the whole computation by slices."""

    def __init__(self, edit: Edit, head: Head, rows: int) -> None:
        self.edit, self.head, self.rows = edit, head, rows
        self.total = len(head.chosen)
        self.ends = head.product.next  # everything is inserted before it
        self.early = EarlyValues(edit, head.known, head.losses, self.ends)
        self.flat: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self.counted: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def write(self) -> int:
        edit, head = self.edit, self.head
        path = {name: head.product.meta[name] for name in ("path",) if name in head.product.meta}
        before = set(edit.graph.nodes)
        made = [node for node in head.known if node is not head.product]  # in the graph's order
        starts = range(0, self.total, self.rows)
        with edit.at(self.ends, "forward"):
            root = self.early.root(made, head.sinks.values(), head.exits)
            if root is not None:
                self._check_precision()
            hidden = self._rows_of_hidden()
            sums: dict[fx.Node, fx.Node] = {}
            parts: dict[fx.Node, list[fx.Node]] = {}
            for start in starts:
                self.start, self.end = start, min(start + self.rows, self.total)
                self._write_slice(hidden, made, sums, parts)
            whole = {node: self._joined(node, found) for node, found in parts.items()}
            whole |= {node: self._summed(node, value) for node, value in sums.items()}
        for node in head.sinks if root is not None else ():
            with edit.at(node, "backward"):
                whole[node] = edit.call(aten.mul.Tensor, whole[node], root)
        for node in set(edit.graph.nodes).difference(before):
            node.meta.update(path)
        for old, new in whole.items():
            old.replace_all_uses_with(new)
        for loss, (counted, _) in self.counted.items():
            for user in loss.users:
                if user.args[1] == 1:
                    user.replace_all_uses_with(counted)
        return len(starts)

    def _check_precision(self) -> None:
        wide = (node.meta["val"].dtype for node, of in self.head.known.items() if of.last == self.head.classes)
        if torch.float16 in wide:
            raise Unlike(
                "in float16 the derivative by the loss must be known in forward, and it is made of the loss or comes "
                "from outside"
            )

    def _rows_of_hidden(self) -> fx.Node:
        """The rows of the hidden states that the loss reads, in its order."""
        head, edit = self.head, self.edit
        if not head.cut:
            return head.hidden  # type: ignore[no-any-return]
        product, found = head.product, head.hidden
        width = shape_of(found)[-1]
        for move in moves_back(head.losses[0].args[0], head.known, lambda node: node is product)[1:]:  # type: ignore[arg-type]
            found = replay(move, found, edit.call, width)
        return self._reshaped(found, [self.total, width])

    def _reshaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        value = node.meta["val"]
        if list(value.shape) == shape:
            return node
        if not value.is_contiguous():
            node = self.edit.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.edit.call(aten.view.default, node, shape)

    def _write_slice(
        self, hidden: fx.Node, made: list[fx.Node], sums: dict[fx.Node, fx.Node], parts: dict[fx.Node, list[fx.Node]]
    ) -> None:
        """Adds this slice's results to the sums, or to the parts of results that have rows."""
        edit, head = self.edit, self.head
        product = head.product
        bias = product.args[:1] if product.target is aten.addmm.default else ()
        mine = edit.call(aten.slice.Tensor, hidden, 0, self.start, self.end)
        values = self.values = {product: edit.call(product.target, *bias, mine, product.args[-1])}  # type: ignore[arg-type]
        for node in made:
            if node.target is not getitem:
                values[node] = self._value(node, head.known[node])
            for loss in (one for one in node.users if one in head.losses):
                self._write_loss(loss, values[node], sums)
        for node in head.exits:
            parts.setdefault(node, []).append(values[node])
        for node, gradient in head.sinks.items():
            of = values[gradient]
            if node.target is not aten.mm.default:
                keeps = node.target is aten.sum.dim_IntList and shape_of(node)[-1:] == (head.classes,)
                part = edit.call(aten.sum.dim_IntList, of, [0], True) if keeps else edit.call(aten.sum.default, of)
                _add(edit, sums, node, part)
            elif node.args[0] is gradient:
                other = self.early(node.args[1])
                parts.setdefault(node, []).append(edit.call(aten.mm.default, of, other))
            else:
                turned = node.args[1] is gradient
                pair = (edit.call(aten.t.default, mine), of) if turned else (edit.call(aten.t.default, of), mine)
                if node in sums and of.meta["val"].dtype == sums[node].meta["val"].dtype:
                    sums[node] = edit.call(aten.addmm.default, sums[node], *pair)
                else:
                    _add(edit, sums, node, edit.call(aten.mm.default, *pair))

    def _write_loss(self, loss: fx.Node, log_p: fx.Node, sums: dict[fx.Node, fx.Node]) -> None:
        edit = self.edit
        weight, reduction, ignored = loss.args[2:]
        if loss not in self.counted:
            self.counted[loss] = self._count(loss)
        classes = edit.call(aten.slice.Tensor, self.counted[loss][1], 0, self.start, self.end)
        given = None if weight is None else self.early(weight)
        pair = edit.call(NLL, log_p, classes, given, NONE if reduction == NONE else SUM, ignored)
        value = edit.call(getitem, pair, 0)
        for found in (user for user in loss.users if user.args[1] == 0):
            if reduction == NONE:
                self.values[found] = value
            else:
                _add(edit, sums, found, value)

    def _count(self, loss: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The divisor of a mean: how many targets count, or the sum of their classes' weights; and the targets."""
        edit = self.edit
        _, targets, weight, _, ignored = loss.args
        dtype = loss.args[0].meta["val"].dtype  # type: ignore[union-attr]
        there = self.early(targets)
        counts = edit.call(aten.ne.Scalar, there, ignored)
        if weight is None:
            return edit.call(aten.sum.default, counts, dtype=dtype), there
        known = edit.call(aten.mul.Tensor, there, counts)
        weights = edit.call(aten.index_select.default, self.early(weight), 0, known)
        return edit.call(aten.sum.default, edit.call(aten.mul.Tensor, weights, counts), dtype=dtype), there

    def _value(self, node: fx.Node, of: Layout) -> fx.Node:
        """The node's value for this slice: ``[rows]``, ``[rows, 1]`` or ``[rows, classes]``."""
        edit, target, values = self.edit, node.target, self.values
        args, kwargs = node.args, dict(node.kwargs)
        first = values.get(args[0])  # type: ignore[arg-type]
        ends = [] if of.last is None else [of.last]
        if target in MOVES:
            assert first is not None
            shape = [self.end - self.start, *ends]
            return first if target in COPIES else self._reshaped(first, shape)
        if target is aten.expand.default:
            return edit.call(target, first, [self.end - self.start, *ends])
        if target in SOFTMAX:
            return edit.call(target, first, 1, *args[2:])  # type: ignore[arg-type]
        if target in SOFTMAX_BACKWARD:
            return edit.call(target, first, values[args[1]], 1, *args[3:])  # type: ignore[index]
        if target in OVER_CLASSES:
            return edit.call(target, first, [1] if isinstance(args[1], list | tuple) else 1, *args[2:], **kwargs)  # type: ignore[arg-type]
        if target in NEW:
            return edit.call(target, first, [self.end - self.start, *ends], *args[2:], **kwargs)  # type: ignore[arg-type]
        if target in (aten.gather.default, aten.scatter_add.default, aten.scatter.value):
            rest = [self._given(one, Layout(of.rows, 1)) for one in args[2:]]
            return edit.call(target, first, 1, *rest, **kwargs)  # type: ignore[arg-type]
        if target is NLL_BACKWARD:
            return self._loss_backward(node)
        if target in LIKE:
            return edit.call(target, first, *args[1:], **kwargs)  # type: ignore[arg-type]
        return edit.call(target, *(self._given(one, of) for one in args), **kwargs)  # type: ignore[arg-type]

    def _loss_backward(self, node: fx.Node) -> fx.Node:
        derivative, log_p, targets, weight, reduction, ignored, _ = node.args
        loss = next(
            one for one in self.head.losses if (*one.args[:3], one.args[4]) == (log_p, targets, weight, ignored)
        )
        counted, there = self.counted[loss]
        by_row = Layout(self.head.chosen, None)
        given = self._given(derivative, by_row) if reduction == NONE else self.early(derivative)
        classes = self.edit.call(aten.slice.Tensor, there, 0, self.start, self.end)
        weights = None if weight is None else self.early(weight)
        return self.edit.call(
            NLL_BACKWARD, given, self.values[log_p], classes, weights, reduction, ignored, counted  # type: ignore[index]
        )  # fmt: skip

    def _given(self, value: Any, of: Layout) -> Any:
        """The argument, for this slice, of a call whose result has this layout."""
        if not isinstance(value, fx.Node):
            return value
        if value in self.values:
            return self.values[value]
        edit, shape = self.edit, shape_of(value)
        ends = shape[len(shape) - (of.last is not None) :]
        lead = shape[: len(shape) - len(ends)]
        one = torch.Size(lead).numel() == 1 and (self.total > 1 or ends == (self.head.classes,))
        if not lead or one:
            found = self.early(value)
            return self._reshaped(found, list(ends)) if lead else found
        if ends == (self.head.classes,):
            return self._wide(value, of)
        if (value, of.last) not in self.flat:
            if not of.of(self.head.chosen):
                raise Unlike(f"{value.name} is read for other rows as well")
            found, rows = self.early(value), list(of.rows.shape)
            if list(lead) != rows:
                found = edit.call(aten.expand.default, found, [*rows, *ends])
            self.flat[value, of.last] = self._reshaped(found, [self.total, *ends])
        return edit.call(aten.slice.Tensor, self.flat[value, of.last], 0, self.start, self.end)

    def _wide(self, value: fx.Node, of: Layout) -> fx.Node:
        """This slice of a value that has all classes of all rows, but is made of something smaller."""
        edit = self.edit
        shape = [self.end - self.start, self.head.classes]
        if value.target is aten.expand.default:
            inner = self._given(value.args[0], of)
            return edit.call(aten.expand.default, inner, shape)
        if value.target is aten.full.default:
            return edit.call(aten.full.default, shape, value.args[1], **value.kwargs)
        if is_pointwise(value.target) and not is_random(value):
            return edit.call(value.target, *(self._given(one, of) for one in value.args), **value.kwargs)  # type: ignore[arg-type]
        raise Unlike(f"{value.name} has all classes of all rows, too")

    def _joined(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        """The slices' parts joined, for a result that has rows."""
        edit, head = self.edit, self.head
        found = edit.call(aten.cat.default, parts) if len(parts) > 1 else parts[0]
        if node in head.exits:
            return self._reshaped(found, list(shape_of(node)))
        if head.cut:
            width = shape_of(node)[-1]
            first, *moves = moves_back(head.sinks[node], head.known, lambda one: head.known[one].of(head.chosen))
            found = self._reshaped(found, [*head.known[first].rows.shape, width])
            for move in moves:
                found = replay(move, found, edit.call, width)
        return found

    def _summed(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """The sum, with the dtype and shape of the node that it replaces."""
        edit = self.edit
        for loss, (counted, _) in self.counted.items():
            if node in loss.users and loss.args[3] == MEAN:
                value = edit.call(aten.div.Tensor, value, counted)
        dtype = node.meta["val"].dtype
        if value.meta["val"].dtype != dtype:
            value = edit.call(aten._to_copy.default, value, dtype=dtype)
        return self._reshaped(value, list(shape_of(node)))


def _add(edit: Edit, sums: dict[fx.Node, fx.Node], node: fx.Node, part: fx.Node) -> None:
    """Adds the part to this node's sum so far, in float32 at least."""
    dtype = part.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    if wide != dtype:
        part = edit.call(aten._to_copy.default, part, dtype=wide)
    sums[node] = edit.call(aten.add.Tensor, sums[node], part) if node in sums else part
