"""The package's operators against ATen's, and against what torch.library asks of an operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled.kernels.aten_operators import TENSOR_FORMS, operators

OTHERS = {"add_": 1, "addcdiv_": 2, "addcmul_": 2}


def _tensors(name: str, numel: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) + 3 for _ in range(1 + OTHERS[name])]


def _aten(name: str, tensors: list[torch.Tensor], scale: float) -> torch.Tensor:
    first, *others = (tensor.clone() for tensor in tensors)
    return getattr(first, name)(*others, **{"alpha" if name == "add_" else "value": scale})


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(numel=st.integers(0, 67), scale=st.floats(-2, 2), seed=st.integers(0, 99))
def test_on_a_cpu_they_round_as_aten_does(name: str, numel: int, scale: float, seed: int) -> None:
    tensors = _tensors(name, numel, seed)
    expected = _aten(name, tensors, scale)
    in_tensor_form = tensors[0].clone()
    TENSOR_FORMS[name](in_tensor_form, *tensors[1:], torch.tensor(scale, dtype=torch.float64))
    getattr(operators, name)(*tensors, torch.tensor(scale, dtype=torch.float64))
    assert torch.equal(tensors[0], expected)
    torch.testing.assert_close(in_tensor_form, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_they_are_sound_operators(name: str) -> None:
    arguments = (*_tensors(name, 5), torch.tensor(0.5, dtype=torch.float64))
    torch.library.opcheck(getattr(operators, name).default, arguments, test_utils=("test_schema", "test_faketensor"))
