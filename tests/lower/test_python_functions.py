"""A Python function in the place of an operator calls that very operator, with those arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.lower.lowering import below_autograd
from fsdp_compiled.lower.program_code import FORMS, Code, function_for

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
# Arguments of the forms: what a value is, and what else stands in its place.
ARGUMENTS: dict[Any, list[Any]] = {
    aten.addmm.default: [(2,), (3, 4), (4, 2)],
    aten.baddbmm.default: [(2, 3, 2), (2, 3, 4), (2, 4, 2)],
    aten.bmm.default: [(2, 3, 4), (2, 4, 2)],
    aten.expand.default: [(2, 1, 3), [2, 4, 3]],
    aten.lerp_.Scalar: [(2, 3), (2, 3), 0.25],
    aten.linalg_vector_norm.default: [(2, 3), 2, None, False],
    aten.mean.dim: [(2, 3), [0], True],
    aten.mm.default: [(3, 4), (4, 2)],
    aten.native_layer_norm.default: [(2, 3), [3], (3,), (3,), 1e-5],
    aten.permute.default: [(2, 3, 4), [2, 0, 1]],
    aten.pow.Tensor_Scalar: [(2, 3), 2],
    aten.reshape.default: [(2, 3, 4), [6, -1]],
    aten.select.int: [(2, 3), 1, 2],
    aten.split_with_sizes.default: [(6,), [1, 2, 3], 0],
    aten.squeeze.dim: [(2, 1, 3), 1],
    aten.sum.dim_IntList: [(2, 3), [0], True],
    aten.transpose.int: [(2, 3, 4), 0, 2],
    aten.unsqueeze.default: [(2, 3), 1],
    aten.view.default: [(2, 3, 4), [4, 6]],
    aten.where.self: [(2, 3), (2, 3), ()],
}
NAMED: dict[Any, list[dict[str, Any]]] = {
    aten.addcmul_.default: [{"value": 0.5}, {"value": 2}],
    aten.clone.default: [{"memory_format": torch.contiguous_format}, {"memory_format": torch.preserve_format}],
    aten.gelu.default: [{"approximate": "tanh"}, {"approximate": "none"}],
    aten.linalg_vector_norm.default: [{"dtype": torch.float32}, {"dtype": torch.float64}],
}


DEFAULTS = ({"memory_format": torch.preserve_format}, {"approximate": "none"})


class Log(TorchDispatchMode):
    """The operators that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        described = [
            (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one for one in args
        ]
        self.calls.append((func, str(described), kwargs or {}))
        return func(*args, **(kwargs or {}))


def given(target: Any, dtype: torch.dtype, least: bool) -> list[Any]:
    """Arguments for this operator, without those that may be left out."""
    forms = ARGUMENTS.get(target, [(2, 3)] * FORMS[target][1].partition(" ; ")[0].count("value"))
    if target is aten.cat.default:
        forms = [[(2, 3), (2, 3)], 1]
    forms = forms[: len(FORMS[target][1].partition(" ; ")[0].partition(" | ")[0].split())] if least else forms
    torch.manual_seed(0)

    def one(form: Any) -> Any:
        if isinstance(form, tuple):
            made = (torch.rand(form, dtype=torch.float64) * 4 + 1).to(dtype)
            return made > 3 if target is aten.where.self and form is forms[0] else made
        return [one(entry) for entry in form] if isinstance(form, list) and isinstance(form[0], tuple) else form

    return [one(form) for form in forms]


def as_nodes(args: list[Any]) -> list[Any]:
    node = fx.Graph().placeholder("x")
    put = lambda one: node if isinstance(one, torch.Tensor) else one  # noqa: E731
    return [[put(entry) for entry in one] if isinstance(one, list) else put(one) for one in args]


def run(function: Callable[..., Any], args: list[Any], **kwargs: Any) -> tuple[Any, Any]:
    """What it returns, or that it fails; and what it called."""
    args = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
    with below_autograd(), Log() as log:
        try:
            result = function(*args, **kwargs)
        except RuntimeError:  # a mean of integers, for one
            return None, log.calls
    found = list(result) if isinstance(result, list | tuple) else [result]
    return [(one.dtype, one.shape, one.stride(), one.tolist()) for one in (*found, args[0]) if one is not None
            and isinstance(one, torch.Tensor)], log.calls  # fmt: skip


@pytest.mark.parametrize("target", FORMS, ids=str)
def test_a_function_calls_the_operator(target: Any) -> None:
    for dtype, least in itertools.product(DTYPES, (True, False)):
        args = given(target, dtype, least)
        function = function_for(target, as_nodes(args), {})
        assert function is FORMS[target][0]
        mine, theirs = run(function, args), run(target, args)
        assert mine == theirs and (mine[0] is None or mine[1])
        for named in NAMED.get(target, []):
            assert function_for(target, as_nodes(args), named) is function
            assert run(function, args, **named) == run(target, args, **named) != theirs or named in DEFAULTS


def test_numbers_in_the_place_of_values_are_the_same_too() -> None:
    """A node may stand for an integer of the batch's sizes, or a tensor of no dims."""
    for target, other in itertools.product(
        (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor), (3, torch.tensor(2.5), torch.tensor(2))
    ):
        for dtype in DTYPES:
            args = [given(target, dtype, True)[0], other]
            assert run(FORMS[target][0], args) == run(target, args)


def test_other_forms_are_called_as_they_are() -> None:
    x = fx.Graph().placeholder("x")
    for target, args, kwargs in (
        (aten.add.Tensor, [x, x], {"alpha": 2}),
        (aten.add.Tensor, [x, 1.0], {}),
        (aten.sum.dim_IntList, [x, None], {}),
        (aten.view.default, [x, [2.0]], {}),
        (aten.native_layer_norm.default, [x, [3], None, None, 1e-5], {}),
        (aten.transpose.int, [x, 0, True], {}),
        (aten.sum.default, [x], {}),
        (aten.view.dtype, [x, torch.int32], {}),
        (aten.addcmul_.default, [x, x, x], {"value": x}),
        (aten.linalg_vector_norm.default, [x, 2.5, [0], False], {}),
    ):
        assert function_for(target, args, kwargs) is target


def test_control_another_operator_is_noticed() -> None:
    """`torch.sub` with its arguments turned round is another call, and `torch.mul` another operator."""
    args = given(aten.sub.Tensor, torch.float32, True)
    args[1] = args[1] + 1
    assert run(lambda x, y: torch.sub(y, x), args) != run(aten.sub.Tensor, args)
    assert run(torch.mul, args)[1] != run(aten.sub.Tensor, args)[1]


def test_a_program_calls_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(aten.mm.default, (x, graph.call_function(aten.t.default, (x,))))])
    code, given = Code(graph), torch.randn(3, 4)
    assert {torch.mm, torch.t} <= {one for one in code._values.values() if callable(one)}
    assert torch.equal(code.run(given)[0], given @ given.t())
