"""The kernels as operators of ``torch.ops.fsdp_compiled``: flatten, flatten_, accumulate_, measure, adam_,
pack, unpack and combine.

On CUDA they launch Triton kernels; elsewhere they are the plain PyTorch of `reference`, whose signatures they have.
Compilers see them whole. What they write is in their schemas, they allocate what they return and nothing else, and
they read nothing on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from fsdp_compiled.kernels import reference

Function = Callable[..., Any]
Tensors = Sequence[torch.Tensor]
PACKED = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = torch.library.Library("fsdp_compiled", "FRAGMENT")
_ADAM = "float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize"
_SCHEMAS = {
    "flatten": "(Tensor[] gradients, int[] offsets, int numel, ScalarType dtype, Tensor? scale=None) -> Tensor",
    "flatten_": "(Tensor(a!) flat, Tensor[] gradients, int[] offsets, int[] kept) -> ()",
    "accumulate_": "(Tensor(a!)[] totals, Tensor[] parts, Tensor? scale=None, Tensor(b!)? nonfinite=None) -> Tensor",
    "measure": "(Tensor[] parts, Tensor? scale=None, Tensor(a!)? nonfinite=None) -> Tensor",
    "adam_": "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] copies, Tensor lr, Tensor step, Tensor? factor=None, "
    f"Tensor? scheduled=None, Tensor? skipped=None, *, {_ADAM}) -> ()",
    "pack": "(Tensor values, int rows, Tensor? seed=None, int salt=0, *, str form) -> Tensor",
    "unpack": "(Tensor packed, int rows, int numel, ScalarType dtype, *, str form) -> Tensor",
    "combine": "(Tensor packed, int rows, int numel, ScalarType dtype, *, str form, bool mean) -> Tensor",
}


def check_places(gradients: Tensors, offsets: Sequence[int], numel: int, *_: Any) -> None:
    """Raises ``ValueError`` unless the gradients fit between these offsets without overlap."""
    if len(gradients) != len(offsets):
        raise ValueError(f"flatten: {len(gradients)} gradients for {len(offsets)} offsets; expected one each.")
    end = 0
    for index, (gradient, offset) in enumerate(zip(gradients, offsets, strict=True)):
        if offset < end:
            raise ValueError(
                f"flatten: gradient {index} is to begin at {offset}, but the one before it ends at {end}; expected "
                "offsets that ascend, with room for each gradient."
            )
        end = offset + gradient.numel()
    if end > numel:
        raise ValueError(f"flatten: the last gradient ends at {end}, but the buffer has {numel} elements.")


def check_stretches(flat: torch.Tensor, gradients: Tensors, offsets: Sequence[int], kept: Sequence[int]) -> None:
    """Raises ``ValueError`` unless the gradients and what is kept fit into ``flat``, each at a place of its own."""
    check_places(gradients, offsets, flat.numel())
    if len(kept) % 2:
        raise ValueError(f"flatten_: {len(kept)} bounds of what is kept; expected two for each stretch.")
    own = [(offset, offset + gradient.numel()) for gradient, offset in zip(gradients, offsets, strict=True)]
    taken = sorted([*own, *zip(kept[::2], kept[1::2], strict=True)])
    for (start, end), (following, _) in zip(taken, [*taken[1:], (flat.numel(), 0)], strict=True):
        if not 0 <= start <= end <= following:
            raise ValueError(
                f"flatten_: what lies at [{start}, {end}) reaches over {following}, where the next begins, or the "
                "buffer ends; expected a place of its own for each gradient and for what is kept."
            )


def check_lists(*arguments: Any) -> None:
    """Raises ``ValueError`` unless the lists among the arguments are parallel, or empty, and can be walked as flat."""
    lists = [argument for argument in arguments if isinstance(argument, list | tuple)]
    expected = [tensor.numel() for tensor in lists[0]]
    for number, tensors in enumerate(lists):
        sizes = [tensor.numel() for tensor in tensors]
        if tensors and sizes != expected:
            raise ValueError(f"list {number} holds tensors of {sizes} elements; expected {expected}, as list 0.")
        if odd := [index for index, tensor in enumerate(tensors) if not tensor.is_contiguous()]:
            raise ValueError(f"tensor {odd[0]} of list {number} is not contiguous; expected slices of flat buffers.")


def check_values(values: torch.Tensor, rows: int, *_: Any) -> None:
    """Raises ``ValueError`` unless the values can be packed in so many rows."""
    if values.dim() != 1 or not values.is_contiguous() or values.dtype not in PACKED or rows < 1:
        raise ValueError(
            f"pack: values of {values.dtype}, shape {list(values.shape)} and stride {values.stride()}, in {rows} rows; "
            f"expected a contiguous flat tensor of {', '.join(map(str, PACKED))}, in one row or more."
        )


def check_packed(rows_of: Function) -> Function:
    """A check that raises ``ValueError`` unless the bytes are those of ``rows_of(numel, rows)`` packed elements."""

    def check(packed: torch.Tensor, rows: int, numel: int, *_: Any) -> None:
        if packed.numel() != rows * (size := reference.row_of(*rows_of(numel, rows))[1]) or not packed.is_contiguous():
            raise ValueError(f"{packed.numel()} packed bytes for {numel} elements; expected {rows} rows of {size}.")

    return check


def _packed_shape(values: torch.Tensor, rows: int, *_: Any, **__: Any) -> torch.Tensor:
    return values.new_empty(rows * reference.row_of(values.numel(), rows)[1], dtype=torch.uint8)


def _unpacked_shape(packed: torch.Tensor, rows: int, numel: int, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return packed.new_empty(numel, dtype=dtype)


def _flat_shape(gradients: Tensors, offsets: Sequence[int], numel: int, dtype: torch.dtype, *_: Any) -> torch.Tensor:
    return gradients[0].new_empty(numel, dtype=dtype)


def _squares_shape(tensors: Tensors, *_: Any) -> torch.Tensor:
    return tensors[0].new_empty(reference.squares_of(tensors), dtype=reference.compute_dtype(*tensors))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _kernel(module: str, function: str) -> Function:
    """A function of one of the kernels' modules, imported when it runs: without a GPU there may be no Triton."""

    def run(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(f"fsdp_compiled.kernels.{module}"), function)(*arguments, **options)

    return run


# What runs an operator, by its name and the kind of device; the kernels are tried against the references (`trial`).
IMPLEMENTATIONS: dict[str, Function] = {}  # the references
RUNS: dict[tuple[str, str], Function] = {}


def _checked(name: str, device: str, check: Function) -> Function:
    """What runs the operator there, after ``check`` of its positional arguments."""

    def checked(*arguments: Any, **numbers: Any) -> Any:
        check(*arguments)
        return RUNS[name, device](*arguments, **numbers)

    return checked


def _define(name: str, module: str, check: Function, shape: Function, function: str = "") -> None:
    function = function or name.rstrip("_")
    _LIBRARY.define(f"{name}{_SCHEMAS[name]}", tags=(torch.Tag.flexible_layout,) if function == "flatten" else ())
    IMPLEMENTATIONS[name] = RUNS[name, "cpu"] = getattr(reference, function)
    RUNS[name, "cuda"] = _kernel(module, function)
    for device in ("cpu", "cuda"):
        _LIBRARY.impl(name, _checked(name, device, check), device.upper())
    torch.library.register_fake(f"fsdp_compiled::{name}", shape, lib=_LIBRARY)


_define("flatten", "flatten", check_places, _flat_shape)
_define("flatten_", "flatten", check_stretches, _nothing, function="flatten_into")
_define("accumulate_", "accumulate", check_lists, _squares_shape)
_define("measure", "accumulate", check_lists, _squares_shape)
_define("adam_", "update", check_lists, _nothing)
_define("pack", "quantize", check_values, _packed_shape)
_define("unpack", "quantize", check_packed(lambda numel, rows: (numel, rows)), _unpacked_shape)
_define("combine", "quantize", check_packed(lambda numel, rows: (numel, 1)), _unpacked_shape)

operators = torch.ops.fsdp_compiled
KERNELS = tuple(getattr(operators, name).default for name in _SCHEMAS)
