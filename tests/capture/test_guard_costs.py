"""What guards cost: nothing is captured again for what a program exists for, nor for what lies around a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, compile_sharded
from tests.guarded import EAGER, batch, mse, pair
from tests.parts import parts


def test_values_that_alternate_do_not_compile_again(caplog: pytest.LogCaptureFixture) -> None:
    sharded, plain = pair()
    for temp in (1.0, 0.5, 1.0, 0.5, 1.0):
        for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
            model.temp = temp
        torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 2
    assert caplog.text.count("compiling step") == 1


def test_programs_that_values_ask_for_are_bounded() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    model.temp = 0.0  # type: ignore[assignment]

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * model.temp

    with parts() as of:
        sharded = compile_sharded(model, loss=loss, policy=Policy(lower="eager", programs=2))
    for temp in (1.0, 2.0, 3.0):
        model.temp = temp  # type: ignore[assignment]
        sharded.value_and_grad(torch.ones(5, 6))
    assert sharded.captures == 3 and len(sharded.programs) == 2
    assert len({compiled.label for compiled in of(sharded).programs.cached}) == 2


def test_no_guard_looks_at_what_is_compared_anyway() -> None:
    """Tables of parameters, by `ManagedModel`: their guards would be half of all."""
    with parts() as of:
        sharded, _ = pair()
    sharded.step(*batch())
    text = str(of(sharded).programs.newest.capture.guards._manager)
    assert "_modules['head']" in text and "_modules['head']._parameters" not in text
    assert ".teacher[0]._parameters" in text  # which is no part of the model


def test_no_modules_are_walked_to_find_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, _ = pair()
    sharded.step(*batch())

    def walked(*_: Any, **__: Any) -> Any:
        raise AssertionError("modules are walked")

    for name in ("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers"):
        monkeypatch.setattr(nn.Module, name, walked)
    sharded.step(*batch())
    with pytest.raises(AssertionError, match="walked"):  # the control
        sharded.step(*(part[:3] for part in batch()))


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 2))


def hooked() -> nn.Sequential:
    model = linear()
    model.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    return model


def compiled_part() -> nn.Sequential:
    model = linear()
    model[0] = torch.compile(model[0])  # type: ignore[assignment]
    return model


def synchronised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 2), nn.SyncBatchNorm(2))


@pytest.mark.parametrize(
    ("make", "precision"),
    [(linear, LOW), (hooked, None), (hooked, LOW), (compiled_part, None), (synchronised, None)],
)
def test_what_is_around_the_trace_alone_compiles_nothing_again(make: Any, precision: Any) -> None:
    policy = Policy(lower="eager", precision=precision) if precision else EAGER
    sharded = compile_sharded(make(), loss=mse, policy=policy)
    for _ in range(3):
        sharded.value_and_grad(*batch())
    assert sharded.captures == 1
