"""Code that models bring along, traced whole and trained as plain PyTorch trains it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import grad, jvp, vmap
from torch.nn.utils import parametrizations

from fsdp_compiled import Policy, compile_sharded
from tests.test_api import same_weights

logger = logging.getLogger("a model")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


class Custom(nn.Module):
    """An autograd.Function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Square.apply(self.first(x)))


class Autocast(Custom):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(self.first(x)).float()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x[:, None].expand(-1, 5, -1))[0][:, -1])


class Normalised(nn.Module):
    """Weights computed from parameters, one of them with buffers that forward updates and does not read first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(8, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Average(nn.Module):
    """A buffer updated with a value that a gradient flows through: the loss's gradient is not changed by that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


class Literals(nn.Module):
    """Tensors written out in forward, and one that hangs on the module without being a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 3), torch.full((3,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale + torch.tensor([0.5, 0.25, 0.125])
        return torch.where(y > 0, y, torch.tensor(-0.1))


class Replaced(nn.Module):
    """A buffer, and a plain attribute, that forward replaces instead of writing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(8, 3), torch.zeros(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        y = y - self.mean + 0.1 * self.memory
        self.memory = y.detach().mean(0)
        return y


class Talkative(nn.Module):
    """Prints, warns, logs; leaves a loss and features on the module, and asks what its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.first.register_forward_hook(lambda module, inputs, output: setattr(module, "output", output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("input", x.shape, x.mean())
        warnings.warn("an old name", stacklevel=2)
        logger.warning("%s", x)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("never")
        y = self.second(torch.tanh(self.first(x)))
        self.extra = y.square().mean()
        return y if isinstance(self.first.weight, nn.Parameter) else -y


def talkative(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model, x, y) + 0.1 * model.extra + 0.1 * model.first.output.square().mean()


class Selected(nn.Module):
    """Rows chosen by their values: sizes that are not known when the code is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Solved(nn.Module):
    """Operators that check their result, and one whose gradient is laid out otherwise than its fake says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        inverse = torch.linalg.inv(y.mT @ y + torch.eye(8))
        gates = F.softplus(self.gate(x[None]).mT).mT[0]
        return (x @ inverse)[:, :3] * gates + torch.cumsum(gates.mT, -1).mT


def wrapped() -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(smooth()), torch.compile(nn.Linear(3, 8), backend="eager"), nn.Linear(8, 3))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    slopes = vmap(grad(lambda row: model(row[None]).sum()))(x)
    return mse(model, x, y) + slopes.square().mean()


def tangent(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output, slope = jvp(model, (x,), (torch.ones_like(x),))
    return F.mse_loss(output, y) + slope.square().mean()


def forces(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.requires_grad_(True)
    output = model(x)
    (force,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.mse_loss(output, y) + force.square().mean()


def reinforced(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A penalty on the gradient by the parameters."""
    loss = mse(model, x, y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "autograd.Function": (Custom, mse),
    "autocast": (Autocast, mse),
    "LSTM": (Recurrent, mse),
    "weight and spectral norm": (Normalised, mse),
    "running average": (Average, mse),
    "literal tensors": (Literals, mse),
    "vmap(grad) in the loss": (smooth, penalty),
    "jvp in the loss": (smooth, tangent),
    "autograd.grad by the inputs": (smooth, forces),
    "autograd.grad by the parameters": (smooth, reinforced),
    "replaced buffer and attribute": (Replaced, mse),
    "printing, hooks, attributes": (Talkative, talkative),
    "sizes in the data": (Selected, mse),
    "checked operators": (Solved, mse),
    "wrappers": (wrapped, mse),
}


@pytest.mark.filterwarnings("ignore:an old name", "ignore:The .grad attribute")  # of the reference
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_plain_pytorch_does(case: str) -> None:
    make, loss = CASES[case]
    if loss is forces and TORCH < (2, 13):
        pytest.skip("traced from torch 2.13 on")
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=Policy(lower="eager")
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        x, y = torch.randn(5, 8), torch.randn(5, 3)
        found = sharded.step(x.clone(), y)
        optimizer.zero_grad()
        expected = loss(plain, x, y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
    weights = sharded.full_state_dict()
    assert weights.keys() == start.keys()
    for name, value in plain.state_dict().items():
        assert (weights[name] - value).norm() <= 1e-6 * value.norm() + 1e-8
    assert not same_weights(weights, start)


def test_literals_of_one_program_do_not_leak_into_another() -> None:
    class Moods(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + (torch.tensor(1.0) if self.training else torch.tensor(5.0))

    model = Moods()
    sharded = compile_sharded(model, policy=Policy(lower="eager"))
    x = torch.randn(2, 8)
    training = sharded(x)
    model.eval()
    torch.testing.assert_close(sharded(x) - training, torch.full((2, 3), 4.0))


def test_an_operator_with_a_body_of_its_own_is_refused_with_a_cure() -> None:
    def branches(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        return torch.cond(output.sum() > 0, lambda z: z.square().mean(), lambda z: z.abs().mean(), (output,))

    sharded = compile_sharded(smooth(), loss=branches, policy=Policy(lower="eager"))
    with pytest.raises(ValueError, match=r"higher-order operator.*not supported yet"):
        sharded.value_and_grad(torch.randn(5, 8), torch.randn(5, 3))


class Discovered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last, self.calls = nn.Linear(8, 3), None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.linear(x)
        self.calls += 1
        return self.last


def test_what_forward_leaves_on_modules_is_taken_back_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Discovered()
    sharded = compile_sharded(model, loss=mse, policy=Policy(lower="eager"))
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        sharded.value_and_grad(torch.randn(5, 8), torch.randn(5, 3))
    assert model.last is None
    assert "forward keeps tensors in last" in caplog.text and "calls from 0 to 1" in caplog.text


class Written(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


class Grown(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("rows", torch.zeros(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.rows = torch.cat([self.rows, y.detach()])
        return y


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.rand([]) > 0.5 else x[:, :3]


class Answer:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))


def plain_mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


WORDS = torch.zeros(5, 2, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], torch.Tensor | None, str]] = {
    "sparse gradient": (
        lambda: nn.Embedding(4, 3, sparse=True),
        plain_mean,
        WORDS,
        "of weight is sparse.*sparse=False",
    ),
    "embedding that renormalises": (
        lambda: nn.Embedding(4, 3, max_norm=1.0),
        plain_mean,
        WORDS,
        "writes parameter weight",
    ),
    "written parameter": (lambda: Written(8, 3), mse, None, "writes parameter weight.*changed copy"),
    "buffer that grows": (Grown, mse, None, r"buffer rows, torch.float32 \[1, 3\], by .*\[6, 3\]"),
    "branch": (lambda: Branching(8, 3), mse, None, r"torch.rand\(\[\]\)(.|\n)*Cure: .*layerdrop"),
    "cumulative statistics": (cumulative, mse, None, "Cure: .*momentum=None"),
    "list of losses": (smooth, lambda *a: [mse(*a), mse(*a)], None, "returned a list in the place of a scalar"),
    "hidden aux": (smooth, lambda m, x, y: (mse(m, x, y), Answer(x)), None, "Answer was returned, which hides .*x"),
    "sparse batch": (smooth, mse, torch.eye(5, 8).to_sparse(), r"batch\[0\] is a sparse_coo tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_where_why_and_the_cure(case: str) -> None:
    make, loss, x, message = REFUSED[case]
    sharded = compile_sharded(make(), loss=loss, policy=Policy(lower="eager"))
    with pytest.raises(ValueError, match=message):
        sharded.value_and_grad(torch.randn(5, 8) if x is None else x, torch.randn(5, 3))


def test_modules_without_shapes_are_refused_before_anything_is_changed() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"0.weight has no shape yet.*example batch"):
        compile_sharded(model, loss=mse)
    model(torch.randn(5, 8))
    compile_sharded(model, loss=mse)
