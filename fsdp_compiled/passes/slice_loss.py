"""Cross-entropy of a linear head, some rows at a time: neither logits nor their gradient are ever whole.

    before, V classes                               after, for each slice of rows

    logits = addmm(bias, hidden, weight_t)  [N, V]  logits = addmm(bias, hidden[rows], weight_t)      [rows, V]
    log_p = log_softmax(logits)             [N, V]  log_p = log_softmax(logits)
    loss = nll_loss(log_p, targets)                 loss += nll_loss(log_p, targets[rows], "sum")
    ...                                             d_logits = log_softmax_backward(nll_loss_backward(log_p, d_loss))
    d_logits = ...                          [N, V]  d_hidden[rows] = mm(d_logits, weight)
    d_hidden = mm(d_logits, weight)                 d_weight += mm(t(d_logits), hidden[rows])
    d_weight = mm(t(d_logits), hidden)              d_bias += sum(d_logits)

A slice's gradient is made beside its loss, while its logits are there: no product is made twice. That takes the
derivative by the loss before the loss is known, which in a step is a constant, or the factor of the loss's scale. Where
it is made of the loss, or comes from outside (a model that returns its loss), slices' gradients are those of a
derivative of 1, and what is made of them is multiplied by it in backward: as exact, but in float16, where small ones
would be zeros. What is not recognised is refused: who asks for slices has no room for the whole. What is summed over
slices is summed in another order, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import is_random, positions
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
SAME_ROWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._to_copy.default)
MEAN, SUM = 1, 2


def slice_loss(program: Program, plan: Plan) -> Program:
    """Rewrites the one loss of the program; raises ``ValueError`` where there is none that can be."""
    rows = plan.policy.loss_rows
    assert rows is not None
    edit = Edit(program)
    heads = edit.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    found = [node for node in heads if any(user.target is aten.nll_loss_forward.default for user in node.users)]
    if len(found) != 1:
        inside = any(port.kind == "result" for port in program.ports)
        where = "the model's forward, which is to return the loss," if inside else "the loss"
        _refuse(f"{where} has {len(found) or 'no'} calls of cross_entropy on classes", plan)
    head = _Head(found[0], edit, plan)
    count = _in_slices(edit, head, rows)
    return edit.done("slice_loss", f"loss_rows={rows}, as given: logits of {count} slices, [{rows}, {head.classes}]")


def _refuse(reason: str, plan: Plan) -> None:
    raise ValueError(
        f"Policy.loss_rows={plan.policy.loss_rows} cannot be: {reason}. It is for a linear head whose logits go into "
        "F.cross_entropy and nowhere else. Leave loss_rows out, or call fsdp_compiled.chunked_cross_entropy."
    )


@dataclass
class _Head:
    """What there is of the loss in the program, forward and backward."""

    log_softmax: fx.Node
    edit: Edit
    plan: Plan
    product: fx.Node = field(init=False)
    casts: list[torch.dtype] = field(init=False)  # from the product to the softmax
    value: fx.Node = field(init=False)
    nll: fx.Node = field(init=False)
    seed: fx.Node = field(init=False)  # the derivative by the value
    softmax_backward: fx.Node = field(init=False)
    products: list[fx.Node] = field(init=False)  # d_hidden
    weights: list[fx.Node] = field(init=False)  # d_weight
    sums: list[fx.Node] = field(init=False)  # d_bias
    casts_back: list[torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        self._find_forward()
        self._find_backward()

    @property
    def classes(self) -> int:
        return int(self.log_softmax.meta["val"].shape[1])

    def need(self, holds: bool, reason: str) -> None:
        if not holds:
            _refuse(reason, self.plan)

    def _find_forward(self) -> None:
        node, reader = self.log_softmax.all_input_nodes[0], self.log_softmax
        self.casts = []
        while node.target in SAME_ROWS:
            self.need(set(node.users) == {reader}, "its logits are used elsewhere as well")
            if node.target is aten._to_copy.default:
                self.casts.insert(0, node.meta["val"].dtype)
            node, reader = node.all_input_nodes[0], node
        self.need(node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs,
                  f"its logits are made by {node.target}, not by a linear layer")  # fmt: skip
        self.need(set(node.users) == {reader}, "its logits are used elsewhere as well")
        self.product = node
        shape = self.log_softmax.meta["val"].shape
        made = node.meta["val"].shape
        self.need(made == shape and self.log_softmax.args[1] in (1, -1),
                  f"the head's logits are {list(made)}, and the loss reads {list(shape)}")  # fmt: skip
        self.need(all(isinstance(size, int) for size in shape), "the number of rows moves (Policy.dynamic)")
        users = list(self.log_softmax.users)
        known = (aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten._log_softmax_backward_data.default)
        self.need(sorted(str(user.target) for user in users) == sorted(map(str, known)),
                  "its log_softmax is used elsewhere as well, as by label smoothing")  # fmt: skip
        (self.nll,) = (user for user in users if user.target is known[0])
        self.need(self.nll.args[2] is None, "classes have weights")
        self.need(self.nll.args[3] in (MEAN, SUM), 'reduction="none"')
        values = {user.args[1]: user for user in self.nll.users if user.target is getitem}
        self.value = values[0]

    def _find_backward(self) -> None:
        (backward,) = (user for user in self.log_softmax.users if user.target is aten.nll_loss_backward.default)
        self.seed = backward.args[0]  # type: ignore[assignment]
        (self.softmax_backward,) = backward.users
        self.need(self.softmax_backward.target is aten._log_softmax_backward_data.default, "its gradient is changed")
        self.products, self.weights, self.sums, self.casts_back = [], [], [], []
        self._follow(self.softmax_backward, turned=False)

    def _follow(self, gradient: fx.Node, turned: bool) -> None:
        for user in list(gradient.users):
            if user.target in SAME_ROWS and not turned:
                if user.target is aten._to_copy.default:
                    self.casts_back.append(user.meta["val"].dtype)
                self._follow(user, turned)
            elif user.target is aten.t.default and not turned:
                self._follow(user, True)
            elif user.target is aten.mm.default and user.args[0] is gradient:
                (self.weights if turned else self.products).append(user)
            elif user.target is aten.sum.dim_IntList and user.args[1:] == ([0], True) and not turned:
                self.sums.append(user)
            else:
                self.need(False, f"the gradient of its logits goes into {user.target}")
        same = all(node.args[1] is self.product.args[-2] for node in self.weights)
        self.need(same, "its weight's gradient is made of other rows")
        self.need(len(self.casts_back) <= 1, "the gradient of its logits is cast twice")


def _in_slices(edit: Edit, head: _Head, rows: int) -> int:
    """Puts the slices in the place of the whole; returns how many there are."""
    product, nll = head.product, head.nll
    bias = product.args[0] if product.target is aten.addmm.default else None
    hidden, weight = product.args[-2:]
    targets: Any = nll.args[1]
    reduction, ignored = nll.args[3:5]
    total = len(hidden.meta["val"])  # type: ignore[union-attr]
    dtype = head.log_softmax.meta["val"].dtype
    starts = range(0, total, rows)
    path = {name: product.meta[name] for name in ("path",) if name in product.meta}
    before = list(edit.graph.nodes)
    with edit.at(nll, "forward"):
        copies: dict[fx.Node, fx.Node] = {}
        known = _is_known(edit, head)
        seed = _early(edit, head, [head.seed], copies)[0] if known else _one(edit, head)
        turned = _early(edit, head, [node.args[1] for node in head.products], copies)  # type: ignore[misc]
        counts = edit.call(aten.ne.Scalar, targets, ignored)
        counted = edit.call(aten.sum.default, counts, dtype=dtype)
        values: list[fx.Node] = []
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in head.products}
        sums: dict[fx.Node, fx.Node] = {}
        for start in starts:
            end = min(start + rows, total)
            mine = edit.call(aten.slice.Tensor, hidden, 0, start, end)
            classes = edit.call(aten.slice.Tensor, targets, 0, start, end)
            logits = edit.call(product.target, *([bias] if bias is not None else []), mine, weight)  # type: ignore[arg-type]
            for cast in head.casts:
                logits = edit.call(aten._to_copy.default, logits, dtype=cast)
            log_p = edit.call(aten._log_softmax.default, logits, 1, *head.log_softmax.args[2:])
            pair = edit.call(aten.nll_loss_forward.default, log_p, classes, None, SUM, ignored)
            values.append(edit.call(getitem, pair, 0))
            gradient = edit.call(
                aten.nll_loss_backward.default, seed, log_p, classes, None, reduction, ignored, counted
            )
            gradient = edit.call(
                aten._log_softmax_backward_data.default, gradient, log_p, 1, *head.softmax_backward.args[3:]
            )
            for cast in head.casts_back:
                gradient = edit.call(aten._to_copy.default, gradient, dtype=cast)
            for node, other in zip(head.products, turned, strict=True):
                parts[node].append(edit.call(aten.mm.default, gradient, other))
            for node in head.weights:
                across = edit.call(aten.t.default, gradient)
                if node in sums and gradient.meta["val"].dtype == sums[node].meta["val"].dtype:
                    sums[node] = edit.call(aten.addmm.default, sums[node], across, mine)
                else:
                    _add(edit, sums, node, edit.call(aten.mm.default, across, mine))
            for node in head.sums:
                _add(edit, sums, node, edit.call(aten.sum.dim_IntList, gradient, [0], True))
        values = [_wide(edit, value) for value in values]
        loss = values[0]
        for value in values[1:]:
            loss = edit.call(aten.add.Tensor, loss, value)
        if reduction == MEAN:
            loss = edit.call(aten.div.Tensor, loss, counted)
        if loss.meta["val"].dtype != dtype:
            loss = edit.call(aten._to_copy.default, loss, dtype=dtype)
        whole = {node: edit.call(aten.cat.default, found) for node, found in parts.items()}
        for node, value in sums.items():
            kept = node.meta["val"].dtype
            whole[node] = value if value.meta["val"].dtype == kept else edit.call(
                aten._to_copy.default, value, dtype=kept
            )  # fmt: skip
    if not known:
        for node, value in whole.items():
            with edit.at(node, "backward"):
                whole[node] = edit.call(aten.mul.Tensor, value, head.seed)
    for node in set(edit.graph.nodes).difference(before):
        node.meta.update(path)
    for old, new in (*whole.items(), (head.value, loss)):
        old.replace_all_uses_with(new)
    return len(starts)


def _add(edit: Edit, sums: dict[fx.Node, fx.Node], node: fx.Node, part: fx.Node) -> None:
    """To what is summed for this node so far, in float32 at least."""
    part = _wide(edit, part)
    sums[node] = edit.call(aten.add.Tensor, sums[node], part) if node in sums else part


def _wide(edit: Edit, value: fx.Node) -> fx.Node:
    dtype = value.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    return value if wide == dtype else edit.call(aten._to_copy.default, value, dtype=wide)


def _is_known(edit: Edit, head: _Head) -> bool:
    """Whether the derivative by the loss can be made in forward."""
    outside = {node for port, node in edit.inputs.items() if port.kind == "tangent"}
    stack, seen = [head.seed], {head.seed}
    while stack:
        node = stack.pop()
        if node in outside or node in (head.log_softmax, head.nll, head.value):
            return False
        stack += set(node.all_input_nodes) - seen
        seen.update(node.all_input_nodes)
    return True


def _one(edit: Edit, head: _Head) -> fx.Node:
    dtypes = [head.product.meta["val"].dtype, *head.casts, *head.casts_back]
    head.need(torch.float16 not in dtypes, "in float16 the derivative by the loss must be known in forward, and it is "
              "made of the loss or comes from outside")  # fmt: skip
    value = head.seed.meta["val"]
    return edit.call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)


def _early(edit: Edit, head: _Head, wanted: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """These values of backward, made in forward: of what is there before the loss is."""
    order = positions(edit.graph)
    needed: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and order[node] >= order[head.log_softmax] and node not in needed:
            reads_loss = node in (head.log_softmax, head.nll, head.value) or is_random(node)
            head.need(not reads_loss, "more than sums and constants is made of the loss afterwards")
            needed.add(node)
            stack += node.all_input_nodes
    for node in sorted(needed, key=order.__getitem__):
        if node not in copies:
            copies[node] = edit.clone(node, copies)
    return [copies.get(node, node) for node in wanted]
