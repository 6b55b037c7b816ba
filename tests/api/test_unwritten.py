"""A meta model of which something is left unfilled is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime import materialize
from fsdp_compiled.runtime.materialize import unwritten, unwritten_like

CPU = torch.device("cpu")


class Scaled(nn.Embedding):
    """Inherits ``reset_parameters``, which knows nothing of the buffer."""

    def __init__(self) -> None:
        super().__init__(7, 4)
        self.register_buffer("embed_scale", torch.tensor(2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.embed_scale


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inv_freq.cos()


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Half(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].fill_(0.5)
            self.bias.fill_(0.0)


class ByData(nn.Linear):
    def reset_parameters(self) -> None:
        self.weight.data.normal_()
        self.bias.data = torch.zeros_like(self.bias.data)


class Counts(nn.BatchNorm1d):
    """Integers and booleans."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "mask" in self._buffers:
            self.mask.fill_(True)


def linears(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


def sharded(*rest: Callable[[], nn.Module], init: Any = None, first: Any = None) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(first() if first else nn.Embedding(7, 4), *(make() for make in rest), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return compile_sharded(model, optimizer, loss=loss, init=init, policy=Policy(lower="eager"))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: sharded(first=Scaled), r"0\.embed_scale .* Scaled\.reset_parameters\(\) did not fill it: 1 of its 1"),
        (lambda: sharded(lambda: Half(4, 4)), r"1\.weight .* 8 of its 16 elements"),
        (lambda: sharded(Rotary, init=linears), r"1\.inv_freq .* init= did not fill it: 4 of its 4"),
        (lambda: sharded(Gain, init=linears), r"1\.gain .* init= did not fill it"),
        (lambda: sharded(lambda: nn.BatchNorm1d(4), init=linears), r"1\.weight .* init= did not fill it"),
    ],
    ids=["inherited reset_parameters", "a part", "buffer", "parameter", "statistics"],
)
def test_what_nothing_wrote_is_refused_by_name(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make()


def test_what_is_filled_in_whatever_way_is_not() -> None:
    torch.manual_seed(0)
    one = sharded(lambda: ByData(4, 4), Counts)
    assert math.isfinite(float(one.step(torch.arange(6) % 7)))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
     torch.int32, torch.uint8],
)  # fmt: skip
def test_each_dtype_tells(dtype: torch.dtype) -> None:
    made = unwritten_like(torch.empty(3, 5, dtype=dtype, device="meta"), CPU)
    assert unwritten(made) == 15
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert made.isnan().all()
        made[0].zero_()
        assert unwritten(made) == 10
        assert not unwritten(torch.full((4,), float("nan"), dtype=dtype))
    made.zero_()
    assert unwritten(made) == 0


def test_a_bool_may_be_meant_as_it_is() -> None:
    made = unwritten_like(torch.empty(4, dtype=torch.bool, device="meta"), CPU)
    assert not made.any() and unwritten(made) == 0


def test_a_buffer_on_the_meta_device_beside_parameters_that_are_loaded_is_refused() -> None:
    """What fills it would write them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norm: Any = model[1]
    norm.running_mean = torch.empty(4, device="meta")
    for init in (None, lambda module: module.reset_parameters()):
        with pytest.raises(ValueError, match="has running_mean on the meta device, but not weight"):
            compile_sharded(model, None, loss=lambda m, x: m(x).sum(), init=init, policy=Policy(lower="eager"))
    assert norm.running_mean.is_meta


def test_control_memory_as_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "unwritten_like", lambda tensor, device: torch.zeros_like(tensor, device=device))
    assert float(sharded(first=Scaled).step(torch.arange(6))) >= 0
