"""What kernels and collectives allocate besides their results, and free again.

*Kernels*, on a CPU. Each of these was read in PyTorch's code or off the allocator's events:

- a pointwise operator copies each operand that is not in the dtype that it computes in; a reduction, its input;
- dropout's mask is such an operand, and its backward makes a product and scales it into another tensor;
- norms, softmaxes and losses copy what is not contiguous; a matrix product, what is neither that nor transposed;
- a layer norm's backward adds up its weights' gradients in two rows per thread;
- a batch norm's backward makes one intermediate of the input's size;
- flash attention keeps blocks of scores per thread;
- a convolution (oneDNN) works on copies of its tensors in blocked layouts.

In bfloat16 and float16 oneDNN also reorders the operands of matrix products, by rules of its own, which are not here.
On a GPU flash attention's backward alone is counted; the workspaces of cuBLAS and cuDNN are not.

*Collectives*: gloo gathers into a second copy of the result, and several buffers through a copy of them. It
reduce-scatters a copy of its input in place. NCCL copies nothing. A gather keeps its input until it is waited for; so
does a reduce-scatter if nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.nodes import as_traced

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Backend = Literal["gloo", "nccl", "fake"]  # fake: gives shapes only
GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default)
REDUCTION = c10d.reduce_scatter_tensor.default


def backend_of(device: torch.device) -> Backend:
    return "nccl" if device.type == "cuda" else "gloo"


def keeps_input(node: fx.Node, backend: Backend) -> bool:
    """Whether the collective holds on to what it reads until it is waited for."""
    if node.target in GATHERS or node.target is c10d.all_to_all_single.default:
        return backend != "fake"
    return node.target is REDUCTION and backend == "nccl"


def on_wire(node: fx.Node, backend: Backend) -> int:
    """Bytes that the collective allocates besides its results, from its start until it is waited for."""
    if backend != "gloo":
        return 0
    read = sum(source.meta["val"].nbytes for source in node.all_input_nodes)
    if node.target is c10d.all_gather_into_tensor.default:
        return node.meta["val"].nbytes
    if node.target is c10d.all_gather_into_tensor_coalesced.default:
        return sum(value.nbytes for value in node.meta["val"])  # one by one: `distributed.mesh`
    return read if node.target is REDUCTION else 0


def in_kernel(node: fx.Node) -> int:
    """Bytes that the node's kernel allocates besides its results, at its peak."""
    kind = kind_of(node.target)
    if kind == "nothing":
        return 0
    read = [source.meta["val"] for source in node.all_input_nodes]
    read = [value for value in read if isinstance(value, torch.Tensor)]
    if not read or read[0].device.type != "cpu":
        return _on_gpu(node) if node.target in ATTENTION_BACKWARD else 0
    value = node.meta["val"]
    if kind == "casts" and isinstance(value, torch.Tensor) and {one.dtype for one in read} == {value.dtype}:
        return 0
    operands, result = as_traced((read, value))
    results = [value for value in (result if isinstance(result, tuple | list) else [result]) if value is not None]
    workspace = sum(operand.nbytes for operand in operands if _copied(node.target, operand))
    if kind == "arguments":
        # one for each argument, and not for each value: query, key and value may be the same
        places = [source for source in pytree.tree_leaves(node.args) if isinstance(source, fx.Node)]
        given = [as_traced(source.meta["val"]) for source in places if isinstance(source.meta["val"], torch.Tensor)]
        return workspace + _KERNELS[node.target](node, given, results)
    if torch.Tag.pointwise in node.target.tags:
        return workspace + _casts(operands, results)
    if torch.Tag.reduction in node.target.tags and results and operands[0].dtype != results[0].dtype:
        return workspace + operands[0].numel() * results[0].dtype.itemsize
    return workspace


class Workspaces:
    """Works `in_kernel` out once for nodes of one operator with the same fake tensors: equal blocks share theirs."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], int] = {}

    def __call__(self, node: fx.Node) -> int:
        kind = kind_of(node.target)
        if kind == "nothing":
            return 0
        key: tuple[Hashable, ...] = node.target, *[id(one.meta["val"]) for one in (node, *node.all_input_nodes)]
        if kind == "arguments":  # where a tensor stands, and the numbers beside it
            key += tuple([id(one.meta["val"]) if isinstance(one, fx.Node) else repr(one) for one in node.args])
        if (found := self._known.get(key)) is None:
            found = self._known[key] = in_kernel(node)
        return found


@cache
def kind_of(target: Any) -> Literal["nothing", "casts", "tensors", "arguments"]:
    """What decides how much the operator's kernel allocates: its tensors, or the other arguments too; or it allocates
    nothing, or nothing but operands in the dtype that it computes in."""
    if not isinstance(target, torch._ops.OpOverload):
        return "nothing"
    if target in _KERNELS:
        return "arguments"
    if target in CONTIGUOUS or target in PRODUCTS or target in ATTENTION_BACKWARD or torch.Tag.reduction in target.tags:
        return "tensors"
    return "casts" if torch.Tag.pointwise in target.tags else "nothing"


def _on_gpu(node: fx.Node) -> int:
    """Flash attention's backward sums the queries' gradient in float32, and has a float32 number for each row."""
    query = as_traced(node.args[1].meta["val"])  # type: ignore[union-attr]
    return 4 * query.numel() + 4 * query.numel() // query.shape[-1]


Tensors = Sequence[torch.Tensor]

CONTIGUOUS = {
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.embedding_dense_backward.default,
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,  # for a program that was captured on a CPU
}
PRODUCTS = {aten.mm.default, aten.addmm.default}


def _copied(target: Any, operand: torch.Tensor) -> bool:
    """Whether the kernel starts by copying this operand into a layout that it can read."""
    if target in CONTIGUOUS:
        return not operand.is_contiguous()
    if target in PRODUCTS and operand.dim() == 2:
        rows, columns = operand.stride()
        by_row = columns == 1 and rows >= operand.shape[1]
        return not (by_row or (rows == 1 and columns >= operand.shape[0])) and min(operand.shape) > 1
    return False


def _casts(operands: Tensors, results: Tensors) -> int:
    """Copies of the operands that are not in the dtype in which the operator computes."""
    whole = [operand for operand in operands if operand.dim() > 0]
    if not whole or not results:
        return 0
    dtype = results[0].dtype
    if dtype == torch.bool:  # comparisons compute in the dtype of what they compare
        dtype = whole[0].dtype
        for operand in whole:
            dtype = torch.promote_types(dtype, operand.dtype)
    return sum(operand.numel() * dtype.itemsize for operand in whole if operand.dtype != dtype)


def _blocks(operands: Tensors) -> tuple[int, int, int]:
    """Rows of queries, of keys, and the size of a head, in a block of flash attention."""
    query, key = operands[0], operands[1]
    length = query.shape[-2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[-2]), query.shape[-1]


def _attention(operands: Tensors) -> int:
    rows, columns, head = _blocks(operands)
    return 4 * torch.get_num_threads() * (rows * columns + 2 * rows + rows * head)


def _attention_backward(operands: Tensors) -> int:
    rows, columns, _ = _blocks(operands[1:])
    return 4 * torch.get_num_threads() * (2 * rows * columns + rows)


_KERNELS: dict[Any, Callable[[fx.Node, Tensors, Tensors], int]] = {
    aten.where.self: lambda _, read, made: _casts([one for one in read if one.dtype != torch.bool], made),
    # The mask in the input's dtype; in backward, the product before it is scaled.
    aten.native_dropout.default: lambda _, read, made: read[0].nbytes,
    aten.native_dropout_backward.default: lambda _, read, made: read[0].nbytes,
    # A mask of the scores that are minus infinity.
    aten._safe_softmax.default: lambda _, read, made: read[0].numel(),
    aten.native_layer_norm_backward.default: lambda node, read, made: (
        2 * torch.get_num_threads() * math.prod(as_traced(node.args[2])) * read[0].dtype.itemsize
    ),
    aten.native_batch_norm_backward.default: lambda _, read, made: read[1].nbytes,
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda _, read, made: _attention(read),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda _, read, made: _attention_backward(read),
    # Blocked copies of input and weight, then the blocked result beside the plain one.
    aten.convolution.default: lambda _, read, made: max(read[0].nbytes + read[1].nbytes, made[0].nbytes),
    # Blocked copies of the gradient and of the input; an input of few channels (the image) is read as it is.
    aten.convolution_backward.default: lambda _, read, made: (
        read[0].nbytes + (read[1].nbytes if read[1].shape[1] >= 16 else 0)
    ),
}
