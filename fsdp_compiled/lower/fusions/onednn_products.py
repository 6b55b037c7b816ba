"""Large matrix products on a CPU, by the other of the two libraries that PyTorch brings.

    before                         after

    y = mm(x, w)                   y = product(x, w)
    z = addmm(bias, y, v)          p = product(y, v)
                                   z = add(p, bias)

PyTorch multiplies float32 matrices with its BLAS, which is MKL in its wheels; oneDNN comes along for convolutions and
lower precision. Which processors it is faster on, `fsdp_compiled.lower.backends` says. Small products stay: what oneDNN
needs before it starts would cost more than it gains.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.products import product
from fsdp_compiled.plan.plan import Plan

aten = torch.ops.aten
LEAST = 1.6e7  # operations (2 m k n); below, the two are as fast, or oneDNN is slower


def onednn_products(program: Program, plan: Plan) -> Program:
    """The fusion: of the products those that are worth it."""
    edit = Edit(program)
    for node in list(edit.graph.nodes):
        if _is_large(node):
            _replace(edit, node)
    return edit.done("onednn_products")


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


def _replace(edit: Edit, node: fx.Node) -> None:
    if node.target is aten.mm.default:
        node.target = product
        edit.infer(node)
        return
    bias, left, right = node.args
    with edit.at(node, node.meta["phase"]):
        made = edit.call(product, left, right)
    made.meta |= {key: value for key, value in node.meta.items() if key != "val"}
    node.target, node.args = aten.add.Tensor, (made, bias)
    edit.infer(node)
