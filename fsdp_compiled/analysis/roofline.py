"""What a node of a program is estimated to take, from shapes alone: a roofline model of compute, a ring of transfers.

Rough on purpose: it is asked whether a gather fits behind the compute before it, not how long a step takes. The flops
are those that PyTorch's own `FlopCounterMode` counts (matrix products, convolutions, attention).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fsdp_compiled.analysis.contained import attempt
from fsdp_compiled.ir.inference import Alike
from fsdp_compiled.ir.nodes import as_traced, is_collective, is_view, is_wait
from fsdp_compiled.plan.hardware import Machine

aten = torch.ops.aten
# Of attention on a CPU PyTorch counts nothing; it is counted as the same on a GPU, whose arguments begin alike.
ON_CPU: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


Size = Callable[[fx.Node], int]


def seconds(node: fx.Node, machine: Machine) -> float:
    """Of computing a node; nothing for views, placeholders, waits and for starting a collective, and for an operator
    that the formulas cannot read: an estimate stops no program."""
    return _seconds(node, machine, _size)


def _seconds(node: fx.Node, machine: Machine, size: Size) -> float:
    if node.op != "call_function" or is_view(node) or is_collective(node) or is_wait(node):
        return 0.0
    return attempt(lambda: machine.compute(flops(node), _traffic(node, size)), lambda _: 0.0)


def seconds_of(graph: fx.Graph, machine: Machine) -> Iterator[float]:
    """Of each node, in order; of products that are alike one is looked at, however many layers have one."""
    alike, size = Alike(), _Sizes()
    known: dict[Hashable, float] = {}
    products: dict[int, bool] = {}  # by operator, whether a formula counts its multiplications
    for node in graph.nodes:
        target = id(node.target)
        if (product := products.get(target)) is None:
            product = products[target] = _formula(node) is not None
        key: Hashable = None
        if product:
            key = alike.key(node)
        elif node.op == "call_function" and node.target is not getitem:
            # Of all others, tensors alone are asked, which equal blocks share.
            key = target, *[id(source.meta.get("val")) for source in (node, *node.all_input_nodes)]
        if key is None:
            yield _seconds(node, machine, size)
            continue
        if (found := known.get(key)) is None:
            found = known[key] = _seconds(node, machine, size)
        yield found


def _formula(node: fx.Node) -> Callable[..., int] | None:
    packet = getattr(node.target, "overloadpacket", None)
    return flop_registry.get(ON_CPU.get(packet, packet))


def flops(node: fx.Node) -> int:
    """Multiplications and additions; 0 for an operator that moves or maps elements."""
    if (count := _formula(node)) is None:
        return 0
    args, kwargs = pytree.tree_map_only(fx.Node, lambda source: as_traced(source.meta["val"]), (node.args, node.kwargs))
    return int(count(*args, **kwargs, out_val=as_traced(node.meta["val"])))


def traffic(node: fx.Node) -> int:
    """Bytes read and written, each tensor once."""
    return _traffic(node, _size)


def _traffic(node: fx.Node, size: Size) -> int:
    return sum(map(size, node.all_input_nodes), size(node))


class _Sizes:
    """`_size`, looked at once for each fake tensor."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def __call__(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        if (found := self._known.get(id(value))) is None:
            found = self._known[id(value)] = nbytes(value)
        return found


def _size(node: fx.Node) -> int:
    return nbytes(node.meta.get("val"))


def nbytes(value: Any) -> int:
    """Of all tensors in a value; nothing for what has no such size, a sparse tensor for one."""
    value = as_traced(value)
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
