"""``self += scale * ...`` in place, where the scale is a 0-d tensor.

ATen's ``add_(alpha=)``, ``addcdiv_(value=)`` and ``addcmul_(value=)`` take Python numbers, which a program would freeze
when it is captured; a step count or a learning rate lives in a tensor. On a CPU the number is read from the tensor and
ATen's own kernel runs, so that the rounding is that of the eager optimizer. On a GPU nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("fsdp_compiled", "FRAGMENT")
_SCHEMAS = {
    "add_": "(Tensor(a!) self, Tensor other, Tensor alpha) -> ()",
    "addcdiv_": "(Tensor(a!) self, Tensor tensor1, Tensor tensor2, Tensor value) -> ()",
    "addcmul_": "(Tensor(a!) self, Tensor tensor1, Tensor tensor2, Tensor value) -> ()",
}


def add_(self: torch.Tensor, other: torch.Tensor, alpha: torch.Tensor) -> None:
    """``self += alpha * other``."""
    self.add_(other * alpha.to(self.dtype))


def addcdiv_(self: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, value: torch.Tensor) -> None:
    """``self += value * tensor1 / tensor2``."""
    self.add_(value.to(self.dtype) * tensor1 / tensor2)


def addcmul_(self: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, value: torch.Tensor) -> None:
    """``self += value * tensor1 * tensor2``."""
    self.add_(value.to(self.dtype) * tensor1 * tensor2)


# What compilers see in the place of an operator, and what runs on a GPU: nothing here reads the scale on the host.
TENSOR_FORMS: dict[str, Callable[..., None]] = {"add_": add_, "addcdiv_": addcdiv_, "addcmul_": addcmul_}


def _aten(name: str) -> Callable[..., None]:
    method, keyword = getattr(torch.Tensor, name), "alpha" if name == "add_" else "value"

    def run(self: torch.Tensor, *tensors: torch.Tensor) -> None:
        *others, scale = tensors
        method(self, *others, **{keyword: scale.item()})

    return run


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}{_schema}", tags=(torch.Tag.pointwise,))
    _LIBRARY.impl(_name, _aten(_name), "CPU")
    _LIBRARY.impl(_name, TENSOR_FORMS[_name], "CUDA")
    _LIBRARY.impl(_name, lambda *_: None, "Meta")

operators = torch.ops.fsdp_compiled
