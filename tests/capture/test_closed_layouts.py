"""Tensors outside of the model's parameters and buffers that are laid out otherwise later: another object in their
place, of which the trace read no element, or the same object with other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_compiled import compile_sharded
from fsdp_compiled.capture import closure_values
from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.closure_values import Closed
from tests.changes import beside
from tests.toys import EAGER, squares

Held = list[Any]
# What is held, how it is read, and what is done to it.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Held], Any]]] = {
    "shape": (lambda: torch.zeros(2), lambda t: t.shape[0], lambda held: held.__setitem__(0, torch.zeros(3))),
    "dims": (lambda: torch.zeros(2), lambda t: t.dim(), lambda held: held.__setitem__(0, torch.zeros(2, 2))),
    "dtype": (lambda: torch.zeros(2), lambda t: t.element_size(), lambda held: held.__setitem__(0, held[0].double())),
    "strides": (
        lambda: torch.zeros(2, 3), lambda t: t.stride(0), lambda held: held.__setitem__(0, torch.zeros(3, 2).t())
    ),
    "strides in place": (lambda: torch.zeros(2, 3), lambda t: t.stride(0), lambda held: held[0].t_()),
    "gradient": (lambda: torch.zeros(2), lambda t: 1 + t.requires_grad, lambda held: held[0].requires_grad_()),
    "nothing": (lambda: torch.zeros(2), lambda t: 1 + (t is None), lambda held: held.__setitem__(0, None)),
    "array": (lambda: np.zeros((2, 2)), lambda t: t.shape[0], lambda held: held.__setitem__(0, np.zeros((3, 2)))),
    "data": (lambda: torch.full((3,), 2.0), lambda t: t, lambda held: setattr(held[0], "data", torch.ones(3))),
    "set_": (lambda: torch.full((3,), 2.0), lambda t: t, lambda held: held[0].set_(torch.ones(3))),
    "read strides in place": (lambda: torch.eye(3) + torch.ones(3, 3).tril(), lambda t: t, lambda held: held[0].t_()),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, held: Held, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(3, 3), held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read(self.held[0])  # type: ignore[no-any-return]


def losses(kind: str, blocks: int, changed: int) -> tuple[list[float], list[float]]:
    """By eager PyTorch and here; the third of four steps is the first after the change."""
    make, read, change = CHANGES[kind]
    torch.manual_seed(0)
    held = [[make()] for _ in range(blocks)]
    model, eager = (nn.Sequential(*(Block(one, read) for one in held)) for _ in range(2))
    return beside(model, eager, lambda: change(held[changed]))[:2]


@pytest.mark.parametrize("kind", CHANGES)
def test_it_is_seen(kind: str) -> None:
    eager, ours = losses(kind, 1, 0)
    assert eager[2] != eager[1] and ours == eager


@pytest.mark.parametrize("kind", ["shape", "data"])
def test_in_a_block_like_others_it_is_seen(kind: str) -> None:
    eager, ours = losses(kind, 7, 5)
    assert eager[2] != eager[1] and ours == eager


@pytest.mark.parametrize("kind", ["shape", "data"])
def test_control_without_the_question_it_is_not_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Closed.__init__
    monkeypatch.setattr(Closed, "__init__", lambda self, *given: begin(self, *given[:2], (), given[3]))
    monkeypatch.setattr(closure_values, "_place", id)
    eager, ours = losses(kind, 1, 0)
    assert ours[1] == eager[1] and ours[2] == ours[1] != eager[2]


def test_inside_of_a_module_under_torch_compile_it_is_read_where_the_trace_found_it() -> None:
    """Else each step is captured again."""
    make, read, _ = CHANGES["data"]
    model = nn.Sequential(nn.Linear(3, 3), torch.compile(nn.Sequential(Block(held := [make()], read)), backend="eager"))
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.0), loss=squares, policy=EAGER)
    before = sharded.step(torch.ones(2, 3)).item()
    held[0] = held[0] * 3
    assert sharded.step(torch.ones(2, 3)).item() == pytest.approx(before * 9) and sharded.captures == 1


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.tensor([factor])  # no buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_tensors_of_modules_that_have_names_of_ours_stay_apart() -> None:
    """`model.model.factor` and `model.objective.model.factor`."""

    class Objective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Scaled(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)  # type: ignore[no-any-return]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.model, self.objective = nn.Linear(3, 3), Scaled(2.0), Objective()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.objective(self.model(self.linear(x)))  # type: ignore[no-any-return]

    eager, ours, captures = beside(Net(), Net())
    assert ours == pytest.approx(eager) and captures == 1


@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapper_with_the_name_of_pytorchs_is_refused(inside: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self._orig_mod(x)  # type: ignore[no-any-return]

    model = nn.Sequential(Twice(), nn.Tanh()) if inside else Twice()
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.0), loss=squares, policy=EAGER)
    with pytest.raises(CaptureError, match="a submodule called _orig_mod, the name by which"):
        sharded.step(torch.ones(2, 3))
