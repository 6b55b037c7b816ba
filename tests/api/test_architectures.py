"""Code that models bring along, traced whole and trained as plain PyTorch trains it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, no_grad
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fsdp_compiled import Policy, compile_sharded, fully_shard
from tests.architectures import CASES, forces, smooth
from tests.chosen import TORCH
from tests.toys import mse, same_weights


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


def rescaled(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model[0].weight.data = model[0].weight.data / 2
    return mse(model, x, y)


def unhooked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out.register_hook(lambda gradient: 2 * gradient).remove()
    return (out - y).square().mean()


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
    "stretches": (
        smooth,
        lambda m, x, y: checkpoint_sequential(m, 2, x, use_reentrant=False).mean(),
        None,
        "Cure: call torch.utils.checkpoint.checkpoint on each",
    ),
    "contexts of a checkpoint": (
        smooth,
        lambda m, x, y: checkpoint(m, x, use_reentrant=False, context_fn=lambda: (no_grad(), no_grad())).mean(),
        None,
        "Cure: enter contexts, such as autocast, inside",
    ),
    "linearize": (
        smooth,
        lambda m, x, y: torch.func.linearize(torch.sin, m(x))[1](x[:, :3]).mean(),
        None,
        "Cure: .*take jvp",
    ),
    "packed rows": (
        lambda: nn.GRU(3, 3, batch_first=True),
        lambda m, x, y: m(pack_padded_sequence(x, torch.tensor([4, 2]), batch_first=True))[1].mean(),
        torch.randn(2, 4, 3),
        "Cure: give the layer padded rows",
    ),
    "another tensor as data": (
        smooth,
        rescaled,
        None,
        r"Cure: in the place of `x.data = ...`, write a buffer's values",
    ),
    "hook that is removed": (smooth, unhooked, None, "Cure: leave a hook that forward removes"),
    "cumulative statistics": (cumulative, mse, None, "Cure: .*momentum=None"),
    "list of losses": (smooth, lambda *a: [mse(*a), mse(*a)], None, "returned a list in the place of a scalar"),
    "hidden aux": (smooth, lambda m, x, y: (mse(m, x, y), Answer(x)), None, "Answer was returned, which hides .*x"),
    "sparse batch": (smooth, mse, torch.eye(5, 8).to_sparse(), r"batch\[0\] is a sparse_coo tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_where_why_and_the_cure(case: str) -> None:
    if TORCH < (2, 13) and case in (
        "another tensor as data", "contexts of a checkpoint", "linearize", "packed rows", "hook that is removed"
    ):  # fmt: skip
        pytest.skip("its Dynamo says it in other words")
    make, loss, x, message = REFUSED[case]
    sharded = compile_sharded(make(), loss=loss, policy=Policy(lower="eager"))
    with pytest.raises(ValueError, match=message):
        sharded.value_and_grad(torch.randn(5, 8) if x is None else x, torch.randn(5, 3))


def test_a_teacher_that_fully_shard_sharded_is_refused_inside_a_loss() -> None:
    teacher, model = fully_shard(nn.Linear(8, 3)), nn.Linear(8, 3)
    sharded = compile_sharded(model, loss=lambda m, x: (m(x) - teacher(x).detach()).square().mean())
    with pytest.raises(ValueError, match=r"fully_shard sharded is called(.|\n)*Cure: compute its results outside"):
        sharded.value_and_grad(torch.randn(5, 8))


def test_a_teacher_that_is_hidden_in_a_list_is_refused_until_it_is_a_submodule() -> None:
    class Taught(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) - self.teachers[0](x)).square().mean()  # type: ignore[operator]

    model, teacher = Taught(8, 3), nn.Linear(8, 3).requires_grad_(False)
    model.teachers = [teacher]  # type: ignore[assignment]
    x = torch.randn(5, 8)
    expected = model(x)
    fully_shard(teacher)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"Cure: .*Make what holds it a submodule"):
        model(x)
    model.teachers = nn.ModuleList([teacher])
    assert torch.equal(model(x), expected)


def test_modules_without_shapes_are_refused_before_anything_is_changed() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"0.weight has no shape yet.*example batch"):
        compile_sharded(model, loss=mse)
    model(torch.randn(5, 8))
    compile_sharded(model, loss=mse)
