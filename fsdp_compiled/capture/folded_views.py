"""Folds views of views in a traced graph into one view, or into none.

    before                                     after

    y = view(addmm, [2, 16, 96])               q = view(addmm, [2, 16, 3, 4, 8])
    q = view(y, [2, 16, 3, 4, 8])
    w_t = t(w)                                 w_t = t(w)
    d_x = mm(d_y, t(w_t))                      d_x = mm(d_y, w)
    d_w = t(t(mm(t(d_y), x)))                  d_w = mm(t(d_y), x)

A transformer layer has one unneeded view for each of its matrix products, in forward and in backward. They make up a
sixth of the traced graph, which every pass reads and every step calls. Folding looks at sizes alone, since kernels do
not always give their results the strides of the fake ones. A view that only splits dims, or that the next view merges
further, can be left out whatever the strides: if one of the two copies, so does the other. Both views must be in the
same block, so that equal blocks stay equal, whatever comes before and after them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.source_lines import path_of

aten = torch.ops.aten
DETACH = aten.detach.default  # nothing to detach from in a graph that holds its own backward
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)
WHOLE = (aten.view.default, aten.expand.default, aten.slice.Tensor)  # with unchanged sizes these change nothing
_KNOWN = {id(target) for target in (*TURNS, *VIEWS, *WHOLE, DETACH)}  # to hash an operator takes longer


def fold_views(graph: fx.Graph) -> set[fx.Node]:
    """Changes a graph in which nothing is written; returns the views that nothing reads any longer."""
    returned = graph.output_node()
    found = [node for node in graph.nodes if id(node.target) in _KNOWN]
    for node in found:
        if node.target is DETACH:
            continue
        source = _source(node)
        same = _same(node, source)
        # A returned tensor must stay distinct from the inputs, and from the other returned tensors.
        if same is not None and not (returned in node.users and (same.op == "placeholder" or returned in same.users)):
            node.replace_all_uses_with(same)
        elif node.target is aten.view.default and source.target in VIEWS and _one_block(node, source):
            base = _source(source)
            kept, sizes, last = _sizes(base), _sizes(source), _sizes(node)
            if _splits(sizes, kept) or _splits(sizes, last):
                node.target, node.args = source.target, (base, *node.args[1:])
    unread: set[fx.Node] = set()
    for node in reversed(found):
        if unread.issuperset(node.users):
            unread.add(node)
    return unread


def _source(node: fx.Node) -> fx.Node:
    """The tensor that a view is a view of."""
    found: Any = node.args[0]
    while found.target is DETACH:
        found = found.args[0]
    return found  # type: ignore[no-any-return]


def _same(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """An earlier node with the same elements in the same memory as the view; None if there is none."""
    if node.target in TURNS:
        order = _order(node)
        if order == sorted(order):
            return source
        if source.target in TURNS and _one_block(node, source):
            before = _order(source)
            return _source(source) if [before[dim] for dim in order] == sorted(order) else None
        return None
    sizes = _sizes(node)
    if not sizes:
        return None
    if node.target in WHOLE and sizes == _sizes(source):
        return source
    if node.target is aten.view.default and source.target in VIEWS and _one_block(node, source):
        base = _source(source)
        return base if sizes == _sizes(base) and _splits(_sizes(source), sizes) else None
    return None


def _one_block(one: fx.Node, two: fx.Node) -> bool:
    return _block(path_of(one)) == _block(path_of(two))


@lru_cache(1 << 12)
def _block(path: str) -> str:
    """``layers.0.attention.query`` -> ``layers.0``: up to the last index."""
    parts = path.split(".")
    return ".".join(parts[: max((place + 1 for place, part in enumerate(parts) if part.isdecimal()), default=0)])


def _order(node: fx.Node) -> list[int]:
    """For a node of `TURNS`: for each of its dims, the dim of its source."""
    rank = node.meta["val"].dim()
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]  # type: ignore[operator, union-attr]
    one, two = (0, -1) if node.target is aten.t.default else node.args[1:]
    if rank:
        order[one], order[two] = order[two], order[one]  # type: ignore[index]
    return order


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a tensor that has elements, if no size moves; otherwise (), which counts as unknown."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value._has_symbolic_sizes_strides:
        return ()
    return tuple(value.shape) if math.prod(value.shape) else ()


def _splits(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Whether the sizes ``fine`` only split dims of the sizes ``coarse``."""
    return bool(fine and coarse) and {*accumulate(coarse, mul)} <= {*accumulate(fine, mul)}
