"""What calls give is worked out once for those that are alike, and is what running each of them gives."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.ir import inference
from fsdp_compiled.ir.inference import Inference, propagate
from fsdp_compiled.ir.nodes import fake_tensor
from fsdp_compiled.ir.program import Program
from tests.parts import parts

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def stages(layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[Program, ...], int]:
    """What each pass made, and how often an operator ran on fake tensors for it."""
    ran: list[Any] = []

    def counted(mode: Any, target: Any, *given: Any) -> Any:
        ran.append(target)
        return propagate(mode, target, *given)

    monkeypatch.setattr(inference, "propagate", counted)
    model = Model(layers)
    with parts() as of:
        sharded = compile_sharded(model, torch.optim.AdamW(model.parameters()), policy=Policy(lower="eager", clip=1.0))
    sharded.step(torch.ones(2, 4))
    monkeypatch.setattr(inference, "propagate", propagate)
    return of(sharded).programs.newest.stages, len(ran)


def described(program: Program) -> list[Any]:
    """Its text, each value's layout, and which values are one and the same."""
    seen: dict[int, int] = {}
    values = [pytree.tree_leaves(node.meta.get("val")) for node in program.graph.nodes]
    layouts = [
        [(value.shape, value.stride(), value.dtype, value.device, seen.setdefault(id(value), len(seen)))
         for value in row if isinstance(value, torch.Tensor)]
        for row in values
    ]  # fmt: skip
    return [program.text(), layouts]


def test_more_layers_take_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = stages(3, monkeypatch), stages(7, monkeypatch)
    assert many[1] == few[1] > 0
    assert len(many[0][-1].graph.nodes) > 1.5 * len(few[0][-1].graph.nodes)


def test_programs_are_those_of_running_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stages(3, monkeypatch)[0]
    with monkeypatch.context() as patched:
        patched.setattr(Inference, "_key", odd)
        wanted, ran = stages(3, monkeypatch)
    assert ran > 50
    assert [described(one) for one in found] == [described(one) for one in wanted]


def odd(*_: Any) -> Any:
    raise inference._Odd


MODE, CPU = FakeTensorMode(shape_env=ShapeEnv()), torch.device("cpu")


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return fake_tensor(MODE, shape, stride, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(lambda: (aten.mul.Tensor, fake(3), 2), lambda: (aten.mul.Tensor, fake(3), 2.5), id="number"),
        pytest.param(
            lambda: (aten.mul.Tensor, fake(3, dtype=torch.int64), 1),
            lambda: (aten.mul.Tensor, fake(3, dtype=torch.int64), 1.0),
            id="equal numbers of two types",
        ),
        pytest.param(lambda: (aten.t.default, fake(3, 4)), lambda: (aten.t.default, fake(4, 3)), id="shape"),
        pytest.param(
            lambda: (aten.add.Tensor, fake(4), fake(4)),
            lambda: (aten.add.Tensor, fake(4), fake(4, dtype=torch.float64)),
            id="dtype",
        ),
        pytest.param(
            lambda: (aten.clone.default, fake(3, 4)), lambda: (aten.clone.default, fake(4, 3).t()), id="strides"
        ),
    ],
)
def test_calls_that_differ_are_told_apart(
    one: Callable[[], tuple[Any, ...]], other: Callable[[], tuple[Any, ...]]
) -> None:
    infer = Inference(MODE)
    for make in (one, other, one, other):
        target, *args = make()
        got, wanted = infer(target, args, {}), propagate(MODE, target, args, {})
        assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_what_is_returned_is_the_argument_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    infer = Inference(MODE)
    for _ in range(2):
        x, y = fake(3), fake(3)
        assert infer(aten.add_.Tensor, (x, y), {}) is x
        assert infer(aten.add_.Tensor, (y, y), {}) is y
        assert infer(aten.add.Tensor, (x, y), {}) is not x
        first, second = infer(aten.split_with_sizes.default, (fake(5), [2, 3]), {})
        assert first is not second and (first.shape, second.shape) == ((2,), (3,))


def test_what_takes_one_of_many_looks_at_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode()
    many = [fake_tensor(mode, (size,), (1,), torch.float32, torch.device("cpu")) for size in range(1, 101)]
    looked: list[Any] = []
    monkeypatch.setattr(inference, "_plain", lambda value: not looked.append(value))
    infer = Inference(mode)
    assert all(infer(getitem, (many, place), {}) is one for place, one in enumerate(many))
    assert not looked
    infer(aten.cat.default, (many,), {})  # control: what reads all of them does
    assert len(looked) >= len(many)
