"""Estimates the time of a program's node from shapes alone: the roofline of a `Cluster`.

The flops are those that PyTorch's own `FlopCounterMode` counts (matrix products, convolutions, attention). Causal
attention counts half, since fused kernels leave out the other half. Under the eager lowering every operator reads and
writes its tensors. Inductor fuses element-wise operators, copies and sums:

    mm -> add -> gelu -> mul -> mm          eager: 3 reads and 3 writes          fused: 1 read, 1 write

A *run* is what lies between two operators that are not fused. A value that is made in a run and read only there is
never in memory, and a run reads each of its inputs once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fsdp_compiled.analysis.best_effort import attempt
from fsdp_compiled.ir.inference import Alike
from fsdp_compiled.ir.nodes import as_traced, base_of, computes, is_view, is_wait, mutated
from fsdp_compiled.plan.hardware import Cluster

aten = torch.ops.aten
# PyTorch counts nothing for attention on a CPU; it counts as the same on a GPU, whose arguments begin alike.
ON_CPU: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


Size = Callable[[fx.Node], int]
NOT_FUSED = {aten.embedding_dense_backward.default, aten.sort.default, aten.topk.default, aten.index_put.default}


def seconds(node: fx.Node, machine: Cluster) -> float:
    """Seconds to compute a node. Nothing for views, placeholders, waits, the start of a collective, and an operator
    that the formulas cannot read: an estimate stops no program."""
    return _seconds(node, machine, _size)


def _seconds(node: fx.Node, machine: Cluster, size: Size, count: int | None = None) -> float:
    """``count``: its `flops`, where they are known."""
    if not computes(node):
        return 0.0

    def known() -> float:
        products = flops(node) if count is None else count
        if not products:
            own = getattr(node.target, "namespace", "") != "aten"  # one pass over memory, as for a fused kernel
            return machine.compute(0, _traffic(node, size) / (1.0 if own else machine.eager))
        return machine.compute(products, _traffic(node, size), *_rate(node, machine))

    return attempt(known, lambda _: 0.0)


def _rate(product: fx.Node, machine: Cluster) -> tuple[torch.dtype, float]:
    """The dtype in which it multiplies, and the part of that dtype's rate that it reaches."""
    # A product's last operand is a factor; the last operands of attention's backward are sums, in float32.
    attention = is_attention(product)
    operand = product.all_input_nodes[0 if attention else -1].meta["val"]
    return operand.dtype, machine.attention if attention else 1.0


def needed(node: fx.Node, machine: Cluster) -> float:
    """Seconds of the node's multiplications alone, at the machine's rate for their dtype."""
    count = flops(node)
    return count / machine.rate(_rate(node, machine)[0]) if count else 0.0


def is_attention(node: fx.Node) -> bool:
    return "scaled_dot_product" in str(node.target)


def seconds_of(graph: fx.Graph, machine: Cluster, fused: bool = False) -> Iterator[float]:
    """Seconds of each node, in order; ``fused`` as Inductor does it, or each by itself. Of products that are alike only
    one is looked at, however many layers have one."""
    alike, size = Alike(), _Sizes()
    traffic = _in_runs(graph, size) if fused else {}
    known: dict[Hashable, float] = {}
    for node in graph.nodes:
        if node in traffic:
            nbytes, first = traffic[node]
            yield max(nbytes / machine.memory, machine.kernel * first)
            continue
        if _formula(node.target) is None:
            yield _seconds(node, machine, size, 0)
        elif (key := alike.key(node)) is None:
            yield _seconds(node, machine, size)
        else:
            if (found := known.get(key)) is None:
                found = known[key] = _seconds(node, machine, size)
            yield found


@cache
def _formula(target: Any) -> Callable[..., int] | None:
    """What counts an operator's multiplications; None if it makes none."""
    packet = getattr(target, "overloadpacket", None)
    return _grouped if str(packet) == "aten._grouped_mm" else flop_registry.get(ON_CPU.get(packet, packet))


def _grouped(one: torch.Tensor, other: torch.Tensor, *_: Any, **__: Any) -> int:
    """The products of experts, each with rows of its own: ``[rows, k] x [experts, k, n]``, or those of its backward."""
    experts = one.shape[0] if one.dim() == other.dim() == 3 else 1
    return 2 * experts * one.shape[-2] * one.shape[-1] * other.shape[-1]


def flops(node: fx.Node) -> int:
    """Multiplications and additions; 0 for an operator that moves or maps elements; half for causal attention."""
    if (count := _formula(node.target)) is None:
        return 0
    args, kwargs = pytree.tree_map_only(fx.Node, lambda source: as_traced(source.meta["val"]), (node.args, node.kwargs))
    return int(count(*args, **kwargs, out_val=as_traced(node.meta["val"]))) // (2 if _causal(node) else 1)


def _causal(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    if not is_attention(node) or schema is None:
        return False
    names = [argument.name for argument in schema.arguments]
    place = names.index("is_causal") if "is_causal" in names else len(node.args)
    return bool(node.kwargs.get("is_causal", node.args[place] if place < len(node.args) else False))


def _in_runs(
    graph: fx.Graph, size: Size, pieces: Mapping[fx.Node, int] | None = None
) -> dict[fx.Node, tuple[int, bool]]:
    """For each node that Inductor fuses with others: the bytes that it reads and writes then, and whether it is the
    first of its run. ``pieces``: the number of each node's piece, outside of which nothing is fused with it; None: a
    wait ends a run."""
    runs: dict[fx.Node, Hashable] = {}
    run = 0
    for node in graph.nodes:
        if not computes(node):
            run += is_wait(node) and pieces is None
        elif getattr(node.target, "namespace", "") != "aten" or _formula(node.target) or node.target in NOT_FUSED:
            run += 1
        else:
            runs[node] = run if pieces is None else (run, pieces.get(node, node))
    found: dict[fx.Node, tuple[int, bool]] = {}
    read: set[tuple[fx.Node, Hashable]] = set()
    begun: set[Hashable] = set()
    for node, own in runs.items():
        nbytes = 0
        for source in node.all_input_nodes:
            base = base_of(source)
            if runs.get(base) != own and (base, own) not in read:
                read.add((base, own))
                nbytes += size(source)
        if _stays(node, runs, own):
            nbytes += max(size(node), sum(map(size, mutated(node))))
        found[node] = nbytes, own not in begun
        begun.add(own)
    return found


def _stays(node: fx.Node, runs: Mapping[fx.Node, Hashable], run: Hashable) -> bool:
    """Whether the value is in memory: something outside of its run reads it, or it is written in place."""
    if mutated(node):
        return True
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and (is_view(user) or user.target is getitem):
                stack.append(user)
            elif runs.get(user) != run:
                return True
    return False


def _traffic(node: fx.Node, size: Size) -> int:
    written = max(size(node), sum(map(size, mutated(node))))
    return sum(map(size, node.all_input_nodes), written)


class _Sizes:
    """Works `_size` out once for each fake tensor."""

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
    """The bytes of all tensors in a value; nothing for one that has no such size, such as a sparse tensor."""
    value = as_traced(value)
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
