"""Copies between parameters and buffers by rows: PyTorch's own numbers, and one kernel each on a GPU."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.kernels import aten_operators

WORLD = 4
WIDTHS = [4096 * 1024, 4096 * 1024 // 4, 1024, 0, 7]  # of a block's parameters on a rank
ALLOCATES = ("aten.new_empty", "aten.empty")


def on_cuda() -> dict[str, bool]:
    """By operator, whether this PyTorch has a CUDA kernel of its own for it."""
    text = files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml").read_text()
    entries = yaml.load(text, Loader=yaml.CSafeLoader)
    kernels = {one["func"].split("(")[0]: "CUDA" in str(one.get("dispatch", "")) for one in entries}
    return {f"aten.{name if '.' in name else f'{name}.default'}": own for name, own in kernels.items()}


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [str(func)] * (not str(func).startswith(ALLOCATES))
        return func(*args, **(kwargs or {}))


def test_each_is_one_operator_with_a_kernel_on_a_gpu() -> None:
    own = on_cuda()
    with torch.device("meta"), Calls() as calls:
        aten_operators._split(torch.empty(WORLD, sum(WIDTHS)), WIDTHS)
        aten_operators._join(
            [torch.empty(9, 5, dtype=torch.bfloat16), torch.empty(7, dtype=torch.bfloat16)], 4, torch.float32
        )
    assert calls.names == ["aten.split_with_sizes_copy.out", "aten._chunk_cat.out"]
    assert all(own[name] for name in calls.names)
    assert not own["aten.split_with_sizes_copy.default"]  # the control: a copy for each parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_a_copy_and_a_cast(dtype: torch.dtype) -> None:
    parts = torch.randn(WORLD, sum(WIDTHS[2:])).to(dtype)
    found = aten_operators.split_rows(parts, WIDTHS[2:])
    compiled = aten_operators.split_form(parts, WIDTHS[2:])
    for one, form, other in zip(found, compiled, torch.split_with_sizes_copy(parts, WIDTHS[2:], 1), strict=True):
        assert torch.equal(one, other) and torch.equal(form, other) and one.is_contiguous() and form.is_contiguous()
    gradients = [torch.randn(shape).to(dtype) for shape in ((9, 5), (7,), (3, 2, 2))]
    for wanted in (torch.float32, dtype):
        expected = torch._chunk_cat(gradients, 0, WORLD).to(wanted)
        assert torch.equal(aten_operators.join_rows(gradients, WORLD, wanted), expected)
        assert aten_operators.join_rows([one.to("meta") for one in gradients], WORLD, wanted).shape == expected.shape
