"""Finds the values of a program that are made row by row from one matrix of logits: from some rows as from all.

    logits [6, V] -> view [2, 3, V] -> slice [2, 2, V] -> view [4, V] -> log_softmax [4, V] -> ... -> gradient [6, V]
    rows   1 to 6    1 2 3 | 4 5 6     1 2 | 4 5          1 2 4 5        1 2 4 5                      1 2 0 4 5 0

A value is known by the row of logits from which each of its own rows is made (0 where it is zero, which a slice's
backward puts where nothing was read), and by what follows its rows: all classes, one number, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.nodes import is_random, mutated

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)
# These change which rows there are, or their order and shape.
MOVES = (
    *RESHAPES, *COPIES, aten.slice.Tensor, aten.slice_backward.default, aten.select.int, aten.select_backward.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
)  # fmt: skip
SOFTMAX = (aten._log_softmax.default, aten._softmax.default)
SOFTMAX_BACKWARD = (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)
OVER_CLASSES = (
    aten.logsumexp.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.argmax.default,
)  # fmt: skip
LIKE = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
NEW = (aten.new_zeros.default, aten.new_full.default)
NLL, NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
# The result is zero where this argument is.
ZERO_AT = {
    aten.mul.Tensor: (0, 1), aten.div.Tensor: (0,), aten.tanh_backward.default: (0,),
    aten.sigmoid_backward.default: (0,), aten.threshold_backward.default: (0,),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The layout of a value ``[*rows.shape, last]``; ``last`` None: of ``[*rows.shape]``."""

    rows: torch.Tensor  # numbers of rows of logits, from 1; 0: zeros
    last: int | None

    def of(self, chosen: torch.Tensor) -> bool:
        """Whether these are its rows, in this order."""
        return torch.equal(self.rows.flatten(), chosen)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def is_pointwise(target: Any) -> bool:
    found = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return found or target is aten._to_copy.default


def layout(node: fx.Node, known: Mapping[fx.Node, Layout], classes: int) -> Layout | None:
    """The layout of a call that reads values by row; None if it is not made row by row from them."""
    target, args = node.target, node.args
    if target is getitem or mutated(node) or is_random(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    of = known.get(args[0]) if args and isinstance(args[0], fx.Node) else None
    if target in MOVES:
        return _moved(node, of, classes) if of is not None else None
    if target is aten.expand.default:
        last = shape_of(node)[-1]
        fits = of is not None and of.last in (1, last) and shape_of(node)[:-1] == of.rows.shape
        return Layout(of.rows, last) if of is not None and fits and last in (1, classes) else None
    if target in SOFTMAX:
        return of if of is not None and of.last == classes and _is_last(args[1], node) else None
    if target in SOFTMAX_BACKWARD:
        out = known.get(args[1])  # type: ignore[arg-type]
        same = of is not None and out is not None and torch.equal(of.rows, out.rows) and of.last == out.last == classes
        return of if same and _is_last(args[2], node) else None
    if target in OVER_CLASSES:
        return _over_classes(node, of, classes)
    if target is aten.gather.default:
        fits = of is not None and of.last == classes and _is_last(args[1], node) and shape_of(node)[-1] == 1
        return Layout(of.rows, 1) if of is not None and fits and shape_of(node)[:-1] == of.rows.shape else None
    if target is aten.scatter_add.default or target is aten.scatter.value:
        return of if of is not None and of.last == classes and _is_last(args[1], node) else None
    if target in LIKE:
        return of
    if target in NEW:
        *lead, last = shape_of(node)
        fits = of is not None and tuple(lead) == tuple(of.rows.shape) and last in (1, classes)
        return Layout(of.rows, last) if of is not None and fits else None
    if target is NLL_BACKWARD:
        return known.get(args[1])  # type: ignore[arg-type]
    return _pointwise(node, known) if is_pointwise(target) else None


def _is_last(dim: Any, node: fx.Node) -> bool:
    return dim in (-1, node.meta["val"].dim() - 1)


def _over_classes(node: fx.Node, of: Layout | None, classes: int) -> Layout | None:
    if of is None or of.last != classes or len(node.args) < 2:
        return None
    dims = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    if [dim % (of.rows.dim() + 1) for dim in dims if isinstance(dim, int)] != [of.rows.dim()]:
        return None
    return Layout(of.rows, 1 if node.meta["val"].dim() > of.rows.dim() else None)


def _moved(node: fx.Node, of: Layout, classes: int) -> Layout | None:
    target, shape = node.target, shape_of(node)
    if target in COPIES:
        return of
    if target in RESHAPES:
        if of.last == classes:
            kept = shape[-1:] == (classes,) and torch.Size(shape[:-1]).numel() == of.rows.numel()
            return Layout(of.rows.reshape(shape[:-1]), classes) if kept else None
        ends = len(shape) > 1 and shape[-1] == 1
        return Layout(of.rows.reshape(shape[:-1] if ends else shape), 1 if ends else None)
    rank = of.rows.dim() + (of.last is not None)
    if target is aten.unsqueeze.default or target is aten.squeeze.dim:
        more = target is aten.unsqueeze.default
        dim: int = node.args[1] % (rank + more)  # type: ignore[operator,assignment]
        if dim < of.rows.dim():
            return Layout(of.rows.unsqueeze(dim) if more else of.rows.squeeze(dim), of.last)
        if of.last == (None if more else 1):
            return Layout(of.rows, 1 if more else None)
        return of if not more else None
    moved: Any = replay(node, of.rows.unsqueeze(-1) if of.last is not None else of.rows, _call, 1)
    if of.last is None:
        return Layout(moved, None)
    return Layout(moved.squeeze(-1), of.last) if moved.shape[-1:] == (1,) and shape[-1] == of.last else None


def _call(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def replay(move: fx.Node, value: Any, call: Callable[..., Any], last: int) -> Any:
    """Makes the same move of another value with these rows, ``[*rows, last]``, by ``call(target, value, ...)``."""
    target, rest = move.target, move.args[1:]
    if target in RESHAPES:
        return call(aten.view.default, value, [*shape_of(move)[:-1], last])
    if target in (aten.slice_backward.default, aten.select_backward.default):
        sizes: Any = rest[0]
        return call(target, value, [*sizes[:-1], last], *rest[1:])
    return call(target, value, *rest, **move.kwargs)


def _pointwise(node: fx.Node, known: Mapping[fx.Node, Layout]) -> Layout | None:
    read = {place: known[one] for place, one in enumerate(node.args) if isinstance(one, fx.Node) and one in known}
    shape = shape_of(node)
    ends = {one.last is not None for one in read.values()}
    if len(ends) != 1 or any(one in known for one in _nodes(node.kwargs.values())) or len(read) != len(
        [one for one in _nodes(node.args) if one in known]
    ):  # fmt: skip
        return None
    lead, last = (shape[:-1], shape[-1]) if ends == {True} else (shape, None)
    if any(tuple(one.rows.shape) != lead for one in read.values()):
        return None
    rows = next(iter(read.values())).rows
    if any(not torch.equal(one.rows, rows) for one in read.values()):
        zero = ZERO_AT.get(node.target, ())  # type: ignore[call-overload]
        fewer = [read[place].rows for place in zero if place in read and not bool(read[place].rows.all())]
        if len(fewer) != 1:
            return None
        (rows,) = fewer
    if any(not torch.equal(torch.where(rows > 0, one.rows, 0), rows) for one in read.values()):
        return None
    return Layout(rows, last)


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(tuple(values), found.append)
    return found


def moves_back(node: fx.Node, known: Mapping[fx.Node, Layout], begin: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The moves through which a value got its rows, in order; the first is the node where they ``begin``."""
    path: list[fx.Node] = []
    while not begin(node):
        if node.target in MOVES:
            path.insert(0, node)
            node = node.args[0]  # type: ignore[assignment]
        else:
            rows = known[node].rows
            node = next(one for one in node.all_input_nodes if one in known and torch.equal(known[one].rows, rows))
    return [node, *path]
