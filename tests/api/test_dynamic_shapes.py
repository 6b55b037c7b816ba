"""Policy.dynamic: one program for every size of the batch, eager PyTorch's numbers at each, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import CaptureError, Policy, compile_sharded
from fsdp_compiled.capture.dynamic_shapes import sizes_of, traced_with, unfit
from fsdp_compiled.capture.fake_inputs import capture_on
from fsdp_compiled.ir.nodes import fake_mode
from fsdp_compiled.passes import run
from tests.parts import parts
from tests.simulate import enlist, passes, ranks
from tests.toys import EAGER, batches, build, mse, same_weights, sgd

DYNAMIC = replace(EAGER, dynamic=True)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, pytest.param(torch.optim.SGD, marks=pytest.mark.exhaustive)])
def test_one_capture_serves_every_number_of_rows_bit_for_bit(kind: type[torch.optim.Optimizer]) -> None:
    model = build()
    plain = copy.deepcopy(model)
    with parts() as of:
        sharded = compile_sharded(model, kind(model.parameters(), lr=1e-2), loss=mse, policy=DYNAMIC)  # type: ignore[call-arg]
    optimizer = kind(plain.parameters(), lr=1e-2)  # type: ignore[call-arg]
    for rows in (5, 2, 9, 3, 4, 8, 7, 6, 64):
        x, y = batches(1, rows)[0]
        loss = sharded.step(x, y)
        optimizer.zero_grad()
        expected = mse(plain, x, y)
        expected.backward()
        optimizer.step()
        assert torch.equal(loss, expected)
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))
    assert sharded.captures == 1
    assert "float32[rows, 6]" in of(sharded).programs.newest.label


class Words(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(dropout)) for _ in range(1))
        self.head = nn.Linear(6, 13)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def entropy(model: nn.Module, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_rows_and_lengths_move_together(lower: str) -> None:
    """With dropout; equal rows and lengths among them, which must not be taken for one size."""
    torch.manual_seed(0)
    model = Words()
    plain, off = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(3)
    sharded = compile_sharded(model, sgd(model), loss=entropy, policy=Policy(lower=lower, dynamic=(0, 1), bucket_mb=0))
    torch.manual_seed(3)
    optimizer, wrong = sgd(plain), sgd(off)
    for rows, length in ((7, 7), (3, 4), (8, 2), (2, 9)):
        words = torch.randint(13, (rows, length), generator=torch.Generator().manual_seed(rows))
        state = torch.get_rng_state()
        loss = sharded.step(words, (words + 1) % 13)
        for reference, stepper, cut in ((off, wrong, 1), (plain, optimizer, 0)):
            torch.set_rng_state(state)
            stepper.zero_grad()
            expected = entropy(reference, words[cut:], (words[cut:] + 1) % 13)
            expected.backward()
            stepper.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    found = sharded.full_state_dict()
    for name, value in plain.state_dict().items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm() + 1e-8
    assert not all(torch.allclose(found[name], value, rtol=1e-4) for name, value in off.state_dict().items())
    assert sharded.captures == 1


def test_every_kind_of_call_moves_and_what_it_returns_follows() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        output = model(x)
        return F.mse_loss(output, y), {"output": output, "rows": len(x), "twice": 2 * len(x)}

    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=loss, policy=DYNAMIC)
    for rows in (4, 3, 6):
        x, y = batches(1, rows)[0]
        (value, aux), gradients = sharded.value_and_grad(x, y)
        assert aux["output"].shape == (rows, 2) and (aux["rows"], aux["twice"]) == (rows, 2 * rows)
        plain.zero_grad()
        expected = mse(plain, x, y)
        expected.backward()
        assert torch.equal(value, expected.detach()) and torch.equal(sharded(x), plain(x))
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad.flatten())
    assert sharded.captures == 2  # one that differentiates, one forward


def test_a_number_that_would_be_frozen_is_refused() -> None:
    sharded = compile_sharded(
        build(), loss=lambda model, x, y: (mse(model, x, y), {"half": len(x) / 2}), policy=DYNAMIC
    )
    with pytest.raises(CaptureError, match="worked out from a size that moves"):
        sharded.value_and_grad(*batches(1)[0])


def test_attention_over_lengths_that_move() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    plain = copy.deepcopy(layer)
    sharded = compile_sharded(layer, loss=lambda m, x: m(x).square().mean(), policy=replace(EAGER, dynamic=(0, 1)))
    for rows, length in ((3, 4), (2, 5), (6, 6)):
        x = torch.randn(rows, length, 6)
        expected = plain(x).square().mean()
        torch.testing.assert_close(sharded.value_and_grad(x)[0], expected.detach(), rtol=1e-6, atol=0)
    assert sharded.captures == 1


def test_microbatches_of_different_sizes_share_their_programs() -> None:
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=DYNAMIC)
    optimizer = sgd(plain)
    for row in ((4, 3, 2), (5, 6)):
        optimizer.zero_grad()
        for index, rows in enumerate(row):
            x, y = batches(1, rows)[0]
            (sharded.step if index == len(row) - 1 else sharded.accumulate)(x, y)
            (mse(plain, x, y) / len(row)).backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        assert (sharded.full_state_dict()[name] - value).norm() <= 1e-6 * value.norm()
    assert sharded.captures == 2


def test_sizes_that_do_not_move_are_programs_of_their_own() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ((model(x) - y).square() * weights).mean()

    sharded = compile_sharded(build(), loss=loss, policy=DYNAMIC)
    plain = build()
    # Two weights are as many as the rows are in the first call: by chance, as the second shows.
    for rows in (2, 5, 2, 7, 1, 1):
        x, y = batches(1, rows)[0]
        weights = torch.tensor([1.0, 3.0])
        assert torch.equal(sharded.value_and_grad(x, y, weights)[0], loss(plain, x, y, weights))
    assert sharded.captures == 3


def _twice_if_odd(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model, x, y) * (2 if len(x) % 2 else 1)


def _at_least_three(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model, x[:3], y[:3])


def _row_by_row(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([mse(model, x[i], y[i]) for i in range(len(x))]).mean()


@pytest.mark.parametrize(
    ("loss", "stream", "programs"),
    [(_twice_if_odd, (4, 2, 5, 7, 4), 2), (_at_least_three, (4, 2, 5, 2), 2), (_row_by_row, (3, 2, 3), 2)],
    ids=["parity", "bound", "count"],
)
def test_a_program_runs_on_no_size_that_its_code_decided_otherwise_on(
    loss: Any, stream: tuple[int, ...], programs: int, caplog: pytest.LogCaptureFixture
) -> None:
    sharded = compile_sharded(build(), loss=loss, policy=DYNAMIC)
    plain = build()
    for rows in stream:
        x, y = batches(1, rows)[0]
        torch.testing.assert_close(sharded.value_and_grad(x, y)[0], loss(plain, x, y).detach(), rtol=1e-6, atol=0)
    assert sharded.captures == programs
    assert caplog.text.count("asks for certain sizes") == programs - 1


@pytest.mark.parametrize("dynamic", [0, "rows", (0, 0), (-1,), (True,), [0]])
def test_dims_that_are_none_are_refused(dynamic: Any) -> None:
    with pytest.raises(ValueError, match=r'Policy\.dynamic is .*; expected "auto", True, False, or dims'):
        Policy(dynamic=dynamic)


def test_passes_ask_nothing_of_a_size_that_moves() -> None:
    """Else the program would be tied to the answer: on two ranks, where units are gathered and scheduled."""
    batch = batches(1)[0]
    sizes = sizes_of((0,), batch)
    model = build(dropout=0.1)
    with ranks(2) as places:
        rank = enlist(model, torch.optim.AdamW(model.parameters()), Policy(lower="eager", bucket_mb=0), places[0])
        with rank.taken.open() as own:
            found = capture_on(own, mse, rank.plan, {}, batch, {}, gradient=True, sizes=sizes, hints=traced_with(sizes))
        env = fake_mode(found.program.graph).shape_env
        assert env is not None
        asked = [guard.expr for guard in env.guards]
        program = run(found.program, rank.plan, passes(rank))
    assert [guard.expr for guard in env.guards] == asked
    assert len(program.marked("gather")) > len(rank.plan.units)
    for rows, good in ((2, True), (5000, True), (1, False)):
        assert (unfit(program, {"[0]": torch.empty(rows, 6), "[1]": torch.empty(rows, 2)}) is None) == good
