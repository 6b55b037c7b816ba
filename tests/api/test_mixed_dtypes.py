"""Parameters of several dtypes in one optimizer group: eager PyTorch's steps."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded

update = importlib.import_module("fsdp_compiled.passes.update")  # the package has the pass by this name

STEPS = 7  # RAdam begins to rectify at the sixth
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, F32), (F32, BF16), (F16, F32), (BF16, F16, F32)]
# The largest difference of a loss; 0 is bit for bit. In half precision SGD rounds once more: its rate is an input.
CASES: list[tuple[type[optim.Optimizer], dict[str, Any], float]] = [
    (optim.Adam, {}, 0), (optim.Adam, {"amsgrad": True}, 0), (optim.AdamW, {"weight_decay": 0.3}, 0),
    (optim.NAdam, {}, 0), (optim.RAdam, {}, 1e-4), (optim.Adamax, {}, 0), (optim.Adadelta, {}, 0),
    (optim.Adagrad, {"lr_decay": 0.1}, 0), (optim.RMSprop, {"momentum": 0.5}, 0), (optim.Rprop, {}, 0),
    (optim.ASGD, {"lambd": 0.1}, 4e-3), (optim.SGD, {"momentum": 0.9}, 4e-3),
]  # fmt: skip


class Net(nn.Module):
    """A layer of each dtype, twice over: groups have several buffers of one dtype."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes * 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x.to(layer.weight.dtype)).tanh().to(x.dtype)
        return self.head(x).square().mean()


def losses(kind: Any, options: dict[str, Any], dtypes: tuple[torch.dtype, ...]) -> tuple[list[float], list[float]]:
    """Of eager PyTorch, and ours."""
    torch.manual_seed(0)
    if "eps" in inspect.signature(kind).parameters:
        options = {"eps": 1e-4, **options}  # 1e-8 is zero in float16
    eager = Net(dtypes)
    net = copy.deepcopy(eager)
    optimizer = kind(eager.parameters(), lr=0.02, foreach=False, **options)
    sharded = compile_sharded(net, kind(net.parameters(), lr=0.02, **options), policy=Policy(lower="eager"))
    found: tuple[list[float], list[float]] = ([], [])
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = eager(x)
        loss.backward()
        optimizer.step()
        found[0].append(loss.item())
        found[1].append(float(sharded.step(x)))
    return found


@pytest.mark.parametrize(
    "dtypes",
    [DTYPES[0], *(pytest.param(one, marks=pytest.mark.exhaustive) for one in DTYPES[1:])],
    ids=lambda dtypes: " ".join(str(one)[6:] for one in dtypes),
)
@pytest.mark.parametrize(("kind", "options", "bound"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_a_group_of_two_dtypes_steps_as_in_eager_pytorch(
    kind: type[optim.Optimizer], options: dict[str, Any], bound: float, dtypes: tuple[torch.dtype, ...]
) -> None:
    expected, found = losses(kind, options, dtypes)
    assert found == expected if not bound else found == pytest.approx(expected, rel=bound)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.NAdam])
def test_control_calls_that_are_taken_for_the_same_by_their_operator_alone(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ByOperator(update._Shared):
        def __init__(self) -> None:
            super().__init__()
            self.calls = Same()

    class Same(dict[Any, Any]):
        def __setitem__(self, call: Any, node: Any) -> None:
            super().__setitem__(call[0], node)

        def __getitem__(self, call: Any) -> Any:
            return super().__getitem__(call[0])

        def __contains__(self, call: Any) -> bool:
            return super().__contains__(call[0])

        def __iter__(self) -> Any:
            return iter(())

    monkeypatch.setattr(update, "_Shared", ByOperator)
    try:
        expected, found = losses(kind, {}, (BF16, F32))
    except Exception:
        return
    assert found != pytest.approx(expected, rel=4e-3)
