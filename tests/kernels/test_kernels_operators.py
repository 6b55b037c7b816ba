"""The kernels' operators on a CPU: sound for torch.library, true to torch.optim, the same when Inductor lowers them."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fsdp_compiled.kernels
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.kernels.operators import operators
from tests.simulate import lower

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "maximize": False}


def _lists(count: int, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    return [[torch.rand(50, dtype=dtype), torch.rand(3, dtype=dtype)] for _ in range(count)]


def _rate() -> torch.Tensor:
    return torch.tensor(1e-2, dtype=torch.float64)


def _count() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def calls() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    torch.manual_seed(0)
    gradients = [torch.randn(3, 4).t(), torch.tensor([1.0, 2.0, math.inf, -math.inf, 5.0])]
    return {
        "flatten": (operators.flatten.default, (gradients, [0, 64], 128, torch.bfloat16, torch.tensor(0.5)), {}),
        "flatten plainly": (operators.flatten.default, (gradients, [0, 64], 128, torch.float32), {}),
        "flatten the rest": (operators.flatten_.default, (torch.ones(90), gradients, [0, 70], [16, 40, 80, 80]), {}),
        "accumulate": (operators.accumulate_.default, (*_lists(2), torch.tensor(0.5), _count()), {}),
        "measure": (operators.measure.default, (_lists(1)[0], torch.tensor(0.5), _count()), {}),
        "measure plainly": (operators.measure.default, (_lists(1)[0],), {}),
        "adam": (operators.adam_.default, (*_lists(4), [], [], _rate(), torch.tensor(2.0)), ADAM),
        "adam with all": (
            operators.adam_.default,
            (*_lists(5), *_lists(1, torch.bfloat16), _rate(), torch.tensor(2.0), torch.tensor(0.5), _rate()),
            ADAM,
        ),
        "adam skipped": (
            operators.adam_.default,
            (*_lists(4), [], [], _rate(), torch.tensor(2.0), None, None, torch.tensor(1.0)),
            ADAM,
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_they_are_sound_operators(name: str) -> None:
    operator, arguments, numbers = calls()[name]
    torch.library.opcheck(operator, arguments, numbers)


def _flat(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def test_inside_an_inductor_lowered_program_they_give_the_same_numbers() -> None:
    """All in one program, on values that Inductor computed and with results that it computes on, and eagerly."""
    wanted = calls()
    leaves, spec = torch.utils._pytree.tree_flatten([(arguments, numbers) for _, arguments, numbers in wanted.values()])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def step(*given: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(given)
        mine = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        results = []
        for (operator, *_), (arguments, numbers) in zip(
            wanted.values(), torch.utils._pytree.tree_unflatten(mine, spec), strict=True
        ):
            if operator.name().startswith("fsdp_compiled::flatten") and operator is not operators.flatten_.default:
                arguments = ([gradient * 2 for gradient in arguments[0]], *arguments[1:])
            result = operator(*arguments, **numbers)
            results += [result + 1] if result is not None else []
        return results

    found = []
    for run in (step, *(lower(_program(step, tensors), {}, how) for how in ("eager", "inductor"))):
        own = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
        found.append([*run(*own), *own])
    for result in found[1:]:
        for mine, other in zip(result, found[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    changed = sum(not torch.equal(after, before) for after, before in zip(found[0][-len(tensors) :], tensors))
    assert changed == 2 * (1 + 3 + 5) + 1  # two in each list that is written, and a flat buffer


def test_what_reads_a_buffer_stays_behind_the_call_that_writes_it() -> None:
    """A short row of operators may join an earlier one of its block, across calls that it does not depend on."""

    def step(x: torch.Tensor, flat: torch.Tensor) -> list[torch.Tensor]:
        operators.flatten_(flat, [x.sin().cos().exp() + 1], [0], [])
        return [flat.neg()]

    found = []
    for how in ("eager", "inductor"):
        x, flat = torch.linspace(-1, 1, 100), torch.zeros(128)
        found += lower(_program(step, [x, flat]), {}, how)(x, flat)
    torch.testing.assert_close(found[0], found[1])
    assert (found[1][:100] < -1).all()


def test_what_reads_a_buffer_stays_before_the_call_that_writes_it() -> None:
    def step(x: torch.Tensor, flat: torch.Tensor) -> list[torch.Tensor]:
        before = flat.neg()
        operators.flatten_(flat, [x], [0], [])
        return [before + x.sin().cos().exp().sum()]

    found = []
    for how in ("eager", "inductor"):
        x, flat = torch.linspace(-1, 1, 100), torch.full((128,), 3.0)
        found += lower(_program(step, [x, flat]), {}, how)(x, flat)
    torch.testing.assert_close(found[0], found[1])


def _program(step: Any, tensors: list[torch.Tensor]) -> Program:
    mode = FakeTensorMode()
    graph: fx.Graph = make_fx(step)(*(mode.from_tensor(tensor) for tensor in tensors)).graph
    for node in graph.nodes:
        node.meta["phase"] = "update"
        node.meta.setdefault("val", None)  # what returns nothing
    inputs = [Port("in", "batch", str(index)) for index in range(len(tensors))]
    outputs = [Port("out", "aux", str(index)) for index in range(len(graph.output_node().args[0]))]  # type: ignore
    return Program(graph, (*inputs, *outputs), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
        (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ],
)
def test_they_are_torch_optims_formulas(kind: type[Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(1037, dtype=dtype))
    optimizer = kind([parameter], lr=0.03, **options, fused=True)
    mine = [parameter.detach().clone()]
    state = [[torch.zeros_like(mine[0])] for _ in range(3)]
    rate = torch.tensor(0.03, dtype=torch.float64)
    (group,) = optimizer.param_groups
    for step in range(1, 11):
        parameter.grad = torch.randn_like(parameter)
        gradient = [parameter.grad.clone()]
        optimizer.step()
        numbers = {name: group[name] for name in ("eps", "weight_decay", "maximize")}
        numbers |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        numbers["decoupled"] = kind is torch.optim.AdamW
        largest = state[2] if group["amsgrad"] else []
        operators.adam_(mine, gradient, state[0], state[1], largest, [], rate, torch.tensor(float(step)), **numbers)
    # a whole step is 0.03, near-zero second moments turn the last bit of a gradient into part of one
    torch.testing.assert_close(mine[0], parameter.detach(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(mine[0] * (1 + 1e-5), parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: operators.flatten([r(3), r(3)], [0, 2], 64, torch.float32), "begin at 2.*ends at 3"),
        (lambda r: operators.flatten([r(3), r(3)], [0], 64, torch.float32), "2 gradients for 1 offsets"),
        (lambda r: operators.flatten([r(3)], [62], 64, torch.float32), "ends at 65, but the buffer has 64"),
        (lambda r: operators.flatten_(r(9), [r(3)], [4], [5, 8]), r"\[4, 7\) reaches over 5"),
        (lambda r: operators.flatten_(r(9), [r(3)], [0], [5, 10]), r"\[5, 10\) reaches over 9"),
        (lambda r: operators.flatten_(r(9), [r(3)], [0], [5]), "1 bounds of what is kept"),
        (lambda r: operators.accumulate_([r(3)], [r(4)]), r"list 1 .*\[4\] elements; expected \[3\]"),
        (lambda r: operators.accumulate_([r(3)], [r(6)[::2]]), "tensor 0 of list 1 is not contiguous"),
        (
            lambda r: operators.adam_([r(3)], [r(3)], [r(3), r(3)], [r(3)], [], [], r(()), r(()), **ADAM),
            "list 2 holds",
        ),
    ],
)
def test_what_cannot_be_walked_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones)


def test_the_operators_can_be_imported_without_triton() -> None:
    """Only the modules that hold kernels import it, and the others import none of those."""
    root = Path(fsdp_compiled.kernels.__file__).parent
    imports = {
        path.stem: {
            node.module if isinstance(node, ast.ImportFrom) else alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for path in root.glob("*.py")
    }
    kernels = {name for name, found in imports.items() if "triton" in found}
    assert kernels == {"launch", "flatten", "accumulate", "quantize", "update"}
    for name in imports.keys() - kernels:
        assert not imports[name] & {f"fsdp_compiled.kernels.{kernel}" for kernel in kernels}, name
