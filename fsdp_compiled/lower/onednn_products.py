"""Matrix products on a CPU, by the faster of the two libraries that PyTorch brings.

    before                         after, on a processor where oneDNN is faster

    y = mm(x, w)                   y = product(x, w)
    z = addmm(bias, y, v)          p = product(y, v)
                                   z = add(p, bias)

PyTorch multiplies float32 matrices with its BLAS, which is MKL in its wheels; oneDNN comes along for convolutions and
lower precision. On some processors (AMD's, where MKL leaves AVX-512 aside) oneDNN takes half the time. Which one it is
is measured once a process, in some milliseconds. Small products stay: what oneDNN needs before it starts would cost
more than it gains. ``torch.backends.mkldnn.enabled = False``, PyTorch's own switch, leaves all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, fx

aten = torch.ops.aten
LEAST = 1.6e7  # operations (2 m k n); below, the two are as fast, or oneDNN is slower
TRIAL = 256  # rows and columns of the matrices that decide
RUNS = 7
WORTH = 1.25  # times as fast, or it stays as it is

torch.library.define(
    "fsdp_compiled_cpu::product", "(Tensor left, Tensor right) -> Tensor", tags=torch.Tag.flexible_layout
)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``: float32 [m, k] and [k, n] of any strides -> [m, n], contiguous."""
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")  # type: ignore[no-any-return]


def _product_shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


torch.library.impl("fsdp_compiled_cpu::product", "CPU", _product)
torch.library.register_fake("fsdp_compiled_cpu::product", _product_shape)
product = torch.ops.fsdp_compiled_cpu.product.default


def choose(graph: fx.Graph) -> None:
    """Changes the products of the graph that another library makes faster; a piece knows them apart by its key."""
    found = [node for node in graph.nodes if _is_large(node)]
    if found and worth():
        for node in found:
            _replace(graph, node)


def worth() -> bool:
    """Whether oneDNN is there, allowed, and faster by as much as `WORTH`."""
    return torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and _gain() >= WORTH  # type: ignore[attr-defined]


@cache
def _gain() -> float:
    """How many times as fast as PyTorch's product oneDNN's is, on this machine, with this many threads."""
    left, right = torch.ones(2, TRIAL, TRIAL)
    return _seconds(lambda: torch.mm(left, right)) / _seconds(lambda: _product(left, right))


def _seconds(call: Callable[[], object]) -> float:
    """The least of some runs: what disturbs a run makes it longer."""
    call()
    found = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found)


def _is_large(node: fx.Node) -> bool:
    """Whether the node is a float32 product on a CPU of more than `LEAST` operations, of sizes known before the run."""
    if node.target is aten.addmm.default:
        left, right = node.args[1:3]
        if node.kwargs:  # scaled by alpha or beta
            return False
    elif node.target is aten.mm.default:
        left, right = node.args[:2]
    else:
        return False
    value, (m, k), n = node.meta["val"], left.meta["val"].shape, right.meta["val"].shape[1]  # type: ignore[union-attr]
    if value.device.type != "cpu" or value.dtype != torch.float32:
        return False
    return all(isinstance(size, int) for size in (m, k, n)) and 2 * m * k * n >= LEAST


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    if node.target is aten.mm.default:
        node.target = product
        return
    bias, left, right = node.args
    with graph.inserting_before(node):
        made = graph.call_function(product, (left, right))
    made.meta = dict(node.meta)
    node.target, node.args = aten.add.Tensor, (made, bias)
