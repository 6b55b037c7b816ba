"""The factors on a gradient between reduction and update: 1 / microbatches, 1 / loss scale, 1 / rows, clipping.

Each pass multiplies the gradient by its factor, and marks the node ``"factor"``. Fusions read the gradient before these
multiplications, and use one number instead of all factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, purpose_of, upstream

aten = torch.ops.aten
MARK = Mark("norm", purpose="factor of all gradients")
Factor = tuple[fx.Node, bool]  # a 0-d tensor, and whether the gradient is divided by it


def unscaled(gradient: fx.Node) -> tuple[fx.Node, tuple[Factor, ...]]:
    """The gradient before its factors, and the factors, in the order of multiplication."""
    factors: list[Factor] = []
    while purpose_of(gradient) == "factor":
        source, number = gradient.args[:2]
        factors.append((number, gradient.target is aten.div.Tensor))  # type: ignore[arg-type]
        gradient = source  # type: ignore[assignment]
    return gradient, tuple(reversed(factors))


def product(edit: Edit, factors: Sequence[Factor], before: fx.Node) -> fx.Node | None:
    """The product of the factors, made just before this node, or reused from another fusion; None without factors."""
    whole: fx.Node | None = None
    for number, divides in factors:
        one = _made(edit, before, aten.reciprocal.default, number) if divides else number
        whole = one if whole is None else _made(edit, before, aten.mul.Tensor, whole, one)
    if whole is not None:
        edit.hoist(whole, before)
    return whole


def behind(node: fx.Node, factors: Sequence[Factor]) -> fx.Node:
    """The first node after this one that no factor depends on, so that all factors can stand before it."""
    made_of = upstream([number for number, _ in factors], lambda _: True)
    node = node.next
    while node in made_of or node.meta.get("mark") == MARK:
        node = node.next
    return node


def _made(edit: Edit, before: fx.Node, target: Any, *args: fx.Node) -> fx.Node:
    known = next((user for user in args[0].users if user.target is target and user.args == args), None)
    if known is not None:
        return known
    for node in args:
        edit.hoist(node, before)
    with edit.at(before, "update"):
        return edit.call(target, *args, mark=MARK)
