"""A kernel that fails or errs on a device is found out before a program runs it, and its reference takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Sharded, compile_sharded
from fsdp_compiled.kernels import trial
from fsdp_compiled.kernels.operators import IMPLEMENTATIONS, KERNELS, RUNS
from fsdp_compiled.kernels.trial import failure
from fsdp_compiled.lower import trials
from tests.kernel_cases import LIKES
from tests.toys import EAGER, batches, build, mse, same_weights

CPU = torch.device("cpu")
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Puts something in the place of an operator's kernel on the CPU."""
    remembered = trials._failure
    remembered.cache_clear()
    yield lambda name, run: monkeypatch.setitem(RUNS, (name, "cpu"), run)
    remembered.cache_clear()


def off_by_one(name: str) -> Callable[..., Any]:
    """The reference, and then one element more than it should be."""

    def run(*arguments: Any, **options: Any) -> Any:
        result = IMPLEMENTATIONS[name](*arguments, **options)
        written = result if result is not None else arguments[0]
        target = written[0] if isinstance(written, list | tuple) else written
        target.view(-1)[0] += 1
        return result

    return run


def test_every_operator_has_a_trial() -> None:
    schemas = {str(target).removeprefix("fsdp_compiled.").removesuffix(".default") for target in KERNELS}
    assert schemas == LIKES.keys() == IMPLEMENTATIONS.keys()


@pytest.mark.parametrize("name", LIKES)
def test_a_kernel_that_is_right_passes_and_one_that_is_not_is_told_apart(
    name: str, as_on_a_gpu: Callable[[str, Any], None]
) -> None:
    assert failure(LIKES[name], CPU) == ""
    as_on_a_gpu(name, off_by_one(name))
    assert "is off by" in failure(LIKES[name], CPU)


def trained() -> Sharded:
    model = build()
    policy = replace(EAGER, kernels=True, precision=HALF, clip=1.0)
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters(), lr=0.1), loss=mse, policy=policy)
    for batch in batches(3):
        sharded.step(*batch)
    return sharded


def missing(*_: Any, **__: Any) -> None:
    raise ImportError("No module named 'triton'")


@pytest.mark.parametrize(("run", "said"), [(off_by_one("adam_"), "is off by 1"), (missing, "No module named 'triton'")])
def test_a_broken_kernel_is_replaced_by_its_reference_and_said_once(
    run: Any, said: str, as_on_a_gpu: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained().full_state_dict()
    as_on_a_gpu("adam_", run)
    got = [trained().full_state_dict() for _ in range(2)]
    assert same_weights(got[0], expected) and same_weights(got[1], expected)
    warnings = [record.getMessage() for record in caplog.records if "the kernel of" in record.getMessage()]
    assert len(warnings) == 1 and "adam_" in warnings[0] and said in warnings[0] and torch.__version__ in warnings[0]


def test_without_the_trial_the_broken_kernel_would_train(
    as_on_a_gpu: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    expected = trained().full_state_dict()
    as_on_a_gpu("adam_", off_by_one("adam_"))
    monkeypatch.setattr(trials, "_failure", lambda *_: "")
    assert not same_weights(trained().full_state_dict(), expected)


def test_on_a_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_failure", lambda *_: pytest.fail("tried"))
    trained()
    assert trial.RUNS["adam_", "cpu"] is IMPLEMENTATIONS["adam_"]
