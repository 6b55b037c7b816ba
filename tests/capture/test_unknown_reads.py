"""What forward asks of tensors beside their values: gradients, versions, bases, notes on them, numbers in texts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded

EAGER = Policy(lower="eager")
HALF = torch.tensor(0.5)
NAMES = {"0.5": 3.0}
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Toy(nn.Module):
    """Gives a factor, which ``ask`` makes, to what a layer computes."""

    def __init__(self, ask: Callable[..., object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("table", torch.ones(2))
        self.plain = torch.ones(2)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * self.ask(self, x, y)


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).square().mean()
    return result


REFUSED: dict[str, tuple[Callable[..., object], str]] = {
    "gradient of the batch": (lambda toy, x, y: 1.0 if x.grad is None else 2.0, r"tensor\.grad is asked for"),
    "by getattr": (lambda toy, x, y: 1.0 if getattr(x, "grad", None) is None else 2.0, r"tensor\.grad is asked for"),
    "gradient of a parameter": (lambda toy, x, y: 1.0 if toy.layer.bias.grad is None else 2.0, r"tensor\.grad is"),
    "version of the batch": (lambda toy, x, y: 1.0 + x._version, r"tensor\._version is asked for"),
    "version of a buffer": (lambda toy, x, y: 1.0 + toy.table._version, r"tensor\._version is asked for"),
    "base": (lambda toy, x, y: 1.0 if x._base is None else 2.0, r"tensor\._base is asked for"),
    "storage": (lambda toy, x, y: x.untyped_storage().size(), r"untyped_storage\(\)\.size\(\) is asked for"),
    "key of a dictionary": (lambda toy, x, y: NAMES.get(f"{HALF.item()}", 1.0), "a text with a number in it"),
    "in a set": (lambda toy, x, y: 2.0 if f"{HALF.item()}" in {"0.5"} else 1.0, "a text with a number in it"),
    "float of a truth value": (lambda toy, x, y: float((x > 0).any()), r"A truth value .* is made a float"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_trace_would_make_up_is_refused_with_the_line(kind: str) -> None:
    """Each but the last trained before, with another factor than eager PyTorch's, and without a word."""
    ask, said = REFUSED[kind]
    batch = torch.cat([X[:1], X])[1:]  # a view
    batch.add_(0).grad = torch.full_like(batch, 2.0)
    assert torch.isfinite(mean(Toy(ask), batch))
    sharded = compile_sharded(Toy(ask), None, loss=mean, policy=EAGER)
    with pytest.raises(ValueError, match=said) as caught:
        sharded.value_and_grad(batch)
    assert "test_unknown_reads.py" in str(caught.value)


class Apart(torch.autograd.Function):
    """Its backward takes a gradient that is missing for something else than zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * x, x + 1

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:  # type: ignore[override]
        return first if second is None or first is None else first + second


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "unused": lambda first, second: first,
    "detached": lambda first, second: second + first.detach(),
    "both": lambda first, second: first * second,
}


@pytest.mark.parametrize("repeated", [False, True], ids=["once", "in-blocks"])
@pytest.mark.parametrize("use", USES)
def test_backward_that_may_ask_for_a_missing_gradient_is_refused_with_the_line(use: str, repeated: bool) -> None:
    """It was traced with zeros, and where backward takes None for something else, trained otherwise in silence."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return USES[use](*Apart.apply(super().forward(x)))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(4, 4) for _ in range(3 if repeated else 1)))
    mean(model, X).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    sharded = compile_sharded(model, None, loss=mean, policy=EAGER)
    if use == "both":
        gradients = sharded.value_and_grad(X)[1]
        for one, gradient in zip(expected, gradients.values(), strict=True):
            assert one is not None
            torch.testing.assert_close(gradient.view_as(one), one, rtol=0, atol=0)
    else:
        with pytest.raises(ValueError, match=r"set_materialize_grads\(False\), and no gradient comes to") as caught:
            sharded.value_and_grad(X)
        assert "test_unknown_reads.py" in str(caught.value)


def test_what_is_computed_has_no_gradient() -> None:
    """Dynamo alone says that it has one."""

    def ask(toy: Toy, x: torch.Tensor, y: torch.Tensor) -> float:
        return 2.0 if y.grad is None else 3.0

    with pytest.warns(UserWarning, match="attribute of a Tensor that is not a leaf"):
        expected = mean(Toy(ask), X)
    assert compile_sharded(Toy(ask), None, loss=mean, policy=EAGER).value_and_grad(X)[0] == expected


@pytest.mark.parametrize("before", [None, 2.0])
@pytest.mark.parametrize("place", ["layer.weight", "table", "plain"])
def test_notes_on_tensors_of_the_model_are_read_as_they_are_now(place: str, before: float | None) -> None:
    """Whether they were there when the model was taken over, or came after the first step."""

    def noted(model: nn.Module) -> torch.Tensor:
        owner, _, name = f"model.{place}".rpartition(".")
        found: torch.Tensor = getattr(model.layer if owner.endswith("layer") else model, name)
        return found

    eager = Toy(lambda toy, x, y: getattr(noted(toy), "scale", 1.0))
    model = copy.deepcopy(eager)
    for one in (eager, model):
        if before is not None:
            noted(one).scale = before  # type: ignore[attr-defined]
    sharded = compile_sharded(model, None, loss=mean, policy=EAGER)
    assert sharded.value_and_grad(X)[0] == mean(eager, X)
    for one in (eager, model):
        noted(one).scale = 5.0  # type: ignore[attr-defined]
    assert sharded.value_and_grad(X)[0] == mean(eager, X)
