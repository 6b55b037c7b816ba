"""The kernels on a GPU against their references, and what only a GPU can show: launches, graphs, addresses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton")

from fsdp_compiled.kernels.operators import operators
from tests.kernel_cases import (
    ADAM,
    LAYOUTS,
    Gradient,
    accumulates,
    compare_accumulate,
    compare_flatten,
    compare_flatten_into,
    compare_update,
    flattens,
    flattens_into,
)

# Most of an example's time is a compilation, so that a machine lent for minutes tries few.
EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "40"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(**flattens)
def test_flatten(**case: Any) -> None:
    compare_flatten(**case, device="cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1,), (64, 64), (1000, 3000), (2, 3, 66, 65), (16, 40_970)])
def test_flatten_of_one(shape: tuple[int, ...], layout: str) -> None:
    compare_flatten([Gradient(shape, layout, torch.bfloat16, 2)], [3, 70], torch.float32, 0.5, "cuda")


@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True)
@given(**flattens_into)
def test_flatten_the_rest(**case: Any) -> None:
    compare_flatten_into(**case, device="cuda")


@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True)
@given(**accumulates)
def test_accumulate(**case: Any) -> None:
    compare_accumulate(**case, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("step", [1, 500, 10**6])
def test_adam(dtype: torch.dtype, step: int) -> None:
    for case in ({}, {"largest": True}, {"scheduled": 0.85}, {"copy": torch.bfloat16}, {"skipped": 1.0}):
        given: dict[str, Any] = {"copy": None} | case
        compare_update(ADAM, [1, 0, 1037, 100_000], dtype, factor=0.5, device="cuda", step=step, **given)


def test_adam_with_copies_over_32_shards() -> None:
    lengths = [100_000 + 1037 * index for index in range(32)]
    compare_update(ADAM, lengths, torch.float32, torch.bfloat16, 0.5, "cuda", skipped=0.0, odd=7)


def test_the_norm_is_the_same_in_every_run() -> None:
    total, part = torch.randn(3_000_001, device="cuda"), torch.randn(3_000_001, device="cuda")
    squares = [operators.accumulate_([total.clone()], [part]) for _ in range(5)]
    assert all(torch.equal(one, squares[0]) for one in squares)


def test_a_captured_flatten_and_update_replay_on_new_numbers() -> None:
    """Nothing is staged through host memory: a graph of both follows its inputs, 50 times over."""
    gradients = [torch.zeros(300, 200, device="cuda").t(), torch.zeros(77, device="cuda")]
    offsets, numel = [0, 60_032], 60_160
    shard = torch.randn(numel, device="cuda")
    state = [torch.zeros(numel, device="cuda") for _ in range(2)]
    rate = torch.tensor(1e-2, dtype=torch.float64, device="cuda")
    step = torch.zeros((), device="cuda")
    expected, expected_state = shard.cpu(), [tensor.cpu() for tensor in state]

    def run() -> None:
        step.add_(1)
        flat = operators.flatten(gradients, offsets, numel, torch.float32)
        operators.adam_([shard], [flat], [state[0]], [state[1]], [], [], rate, step, **ADAM)

    before = [tensor.clone() for tensor in (shard, *state, step)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.synchronize()
    for tensor, value in zip((shard, *state, step), before, strict=True):
        tensor.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number in range(1, 51):
        for gradient in gradients:
            gradient.normal_()
        rate.fill_(1e-2 / number)
        graph.replay()
        flat = operators.flatten([gradient.cpu() for gradient in gradients], offsets, numel, torch.float32)
        count = torch.tensor(float(number))
        operators.adam_([expected], [flat], [expected_state[0]], [expected_state[1]], [], [], rate.cpu(), count, **ADAM)
        torch.testing.assert_close(shard.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_more_than_two_to_the_31_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    numel = 2**31 + 3 * 4096 + 5
    if free < 3 * 2 * numel:
        pytest.skip("needs 13 GB of free GPU memory")
    source = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    source[-9:] = torch.arange(9)
    flat = operators.flatten([source], [64], numel + 128, torch.bfloat16)
    assert flat[64 + numel - 9 : 64 + numel].tolist() == list(range(9)) and flat[64 + numel :].eq(0).all()
    assert int(flat[: 2**20].count_nonzero()) == 0
