"""Operators by the Python functions that PyTorch has for them, where these take the same arguments.

``torch.ops.aten.mm.default(x, y)`` looks at its schema in each call, ``torch.mm(x, y)`` was compiled for it: the same
kernel, by the same dispatch, 0.3 to 5 us earlier, which is up to half of a small operator. A function has several
operators, and takes the one that fits its arguments; so each operator is listed with the one form of arguments for
which that is it. Others are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fsdp_compiled.torch_private.names import RELEASE

aten = torch.ops.aten
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default

# By operator, the function, and of each argument in its place whether it is a value, values, integers (or values that
# are), one of these, a number, a flag or nothing. Those after the bar may be left out, and those after the semicolon
# are given by name, if at all.
FORMS: Mapping[Any, tuple[Callable[..., Any], str]] = {
    aten.add.Tensor: (torch.add, "value value"),
    aten.add_.Tensor: (torch.Tensor.add_, "value value"),
    aten.addcmul_.default: (torch.Tensor.addcmul_, "value value value ; value"),
    aten.addmm.default: (torch.addmm, "value value value"),
    aten.baddbmm.default: (torch.baddbmm, "value value value"),
    aten.bmm.default: (torch.bmm, "value value"),
    aten.cat.default: (torch.cat, "values | integer"),
    aten.clone.default: (torch.clone, "value ; memory_format"),
    aten.div.Tensor: (torch.div, "value value"),
    aten.exp.default: (torch.exp, "value"),
    aten.expand.default: (torch.Tensor.expand, "value integers"),
    aten.gelu.default: (torch.nn.functional.gelu, "value ; approximate"),
    aten.lerp_.Scalar: (torch.Tensor.lerp_, "value value number"),
    aten.linalg_vector_norm.default: (torch.linalg.vector_norm, "value integer nothing flag ; dtype"),
    aten.mean.dim: (torch.mean, "value integers | flag"),
    aten.mm.default: (torch.mm, "value value"),
    aten.mul.Tensor: (torch.mul, "value value"),
    aten.mul_.Tensor: (torch.Tensor.mul_, "value value"),
    aten.native_layer_norm.default: (torch.native_layer_norm, "value integers value value number"),
    aten.neg.default: (torch.neg, "value"),
    aten.permute.default: (torch.permute, "value integers"),
    aten.pow.Tensor_Scalar: (torch.pow, "value integer"),
    aten.relu.default: (torch.relu, "value"),
    aten.reshape.default: (torch.reshape, "value integers"),
    aten.rsqrt.default: (torch.rsqrt, "value"),
    aten.select.int: (torch.select, "value integer integer"),
    aten.split_with_sizes.default: (torch.split_with_sizes, "value integers | integer"),
    aten.sqrt.default: (torch.sqrt, "value"),
    aten.squeeze.dim: (torch.squeeze, "value integer"),
    aten.sub.Tensor: (torch.sub, "value value"),
    aten.sum.dim_IntList: (torch.sum, "value integers | flag"),
    aten.t.default: (torch.t, "value"),
    aten.tanh.default: (torch.tanh, "value"),
    aten.transpose.int: (torch.transpose, "value integer integer"),
    aten.unsqueeze.default: (torch.unsqueeze, "value integer"),
    aten.view.default: (torch.Tensor.view, "value integers"),
    aten.where.self: (torch.where, "value value value"),
}


def function_for(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function to be called with these arguments of a node; the target itself, where none is sure to be it."""
    if target is ALL_TO_ALL and RELEASE == "2.11":
        return _all_to_all_of_dense
    function, form = FORMS.get(target, (target, ""))
    form, _, named = form.partition(" ; ")
    least, _, more = form.partition(" | ")
    kinds = f"{least} {more}".split()
    if not (kwargs.keys() <= {*named.split()} and len(least.split()) <= len(args) <= len(kinds)):
        return target
    if any(isinstance(value, fx.Node) for value in kwargs.values()):
        return target
    return function if all(_is(kind, value) for kind, value in zip(kinds, args)) else target


def _all_to_all_of_dense(tensor: Tensor, *rest: Any) -> Tensor:
    """In torch 2.11 the operator refuses a tensor that is not contiguous; later releases copy it."""
    return ALL_TO_ALL(tensor.contiguous(), *rest)  # type: ignore[no-any-return]


def _is(kind: str, value: Any) -> bool:
    if kind == "value":
        return isinstance(value, fx.Node)
    if kind == "values":
        return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, fx.Node) for one in value)
    if kind == "integers":
        return isinstance(value, list | tuple) and all(isinstance(one, fx.Node) or type(one) is int for one in value)
    return type(value) is {"integer": int, "number": float, "flag": bool, "nothing": type(None)}[kind]
