"""Gives a model on the meta device memory and values, module by module, by ``init=`` or ``reset_parameters``.

New memory is filled with a pattern that no initialization gives. If nothing wrote a tensor, an error names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compiled.runtime.tensor_parallel.parts import local_part

Initializer = Callable[[nn.Module], Any]
Modules = Sequence[tuple[str, nn.Module]]
Order = dict[nn.Module, tuple[int, str]]  # by module, its position in the model and its name
Holder = tuple[nn.Module, str]  # where a parameter hangs: module._parameters[name]
AT_ONCE = 1 << 20  # elements that are compared at a time, so that comparing takes little memory
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_initializable(modules: Modules, init: Initializer | None) -> None:
    """Raises ``ValueError``, before anything is changed, if a module on the meta device cannot be filled."""
    for name, module in modules:
        there = [key for key, one in module._parameters.items() if one is not None and not one.is_meta]
        meta = [key for key, one in module._buffers.items() if one is not None and one.is_meta]
        if there and meta:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has {meta[0]} on the meta device, but not "
                f"{there[0]}: what fills the one would write the other. Give it values, module.{meta[0]} = tensor."
            )
    if init is not None:
        return
    for name, module in modules:
        own = {key: one for key, one in {**module._parameters, **module._buffers}.items() if one is not None}
        if any(one.is_meta for one in own.values()) and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has no reset_parameters() "
                f"to fill {', '.join(own)}. Pass init=, a function that fills the parameters and buffers of the "
                "module it is given."
            )


def materialize(holders: Iterable[Holder], order: Order, device: torch.device, init: Initializer | None) -> None:
    """Fills the meta parameters at these places, module by module in the model's order; tied ones stay tied.

    Raises ``ValueError`` for a tensor that nothing wrote.
    """
    modules = list(dict.fromkeys(module for module, name in holders if held((module, name)).is_meta))
    replaced: dict[int, nn.Parameter] = {}
    for module in sorted(modules, key=order.__getitem__):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in replaced:
                    empty = local_part(parameter)
                    if empty.shape != parameter.shape:  # cut along the tp axis
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    real = unwritten_like(empty, device)
                    replaced[id(parameter)] = nn.Parameter(real, parameter.requires_grad)
                module._parameters[name] = replaced[id(parameter)]
        for name, tensor in module._buffers.items():
            if tensor is not None and tensor.is_meta:
                module._buffers[name] = unwritten_like(tensor, device)
        _fill(module, order[module][1], init)


def materialize_buffers(model: nn.Module, device: torch.device, init: Initializer | None) -> None:
    """Fills the meta buffers of modules that own no parameters, such as rotary tables."""
    for path, module in model.named_modules():
        meta = [name for name, tensor in module._buffers.items() if tensor is not None and tensor.is_meta]
        for name in meta:
            module._buffers[name] = unwritten_like(module._buffers[name], device)  # type: ignore[arg-type]
        if meta:
            _fill(module, path, init)


def _fill(module: nn.Module, path: str, init: Initializer | None) -> None:
    with torch.no_grad():
        if init is not None:
            init(module)
        else:
            module.reset_parameters()  # type: ignore[operator]
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and (found := unwritten(tensor)):
            by = "init=" if init is not None else f"{type(module).__name__}.reset_parameters()"
            raise ValueError(
                f"{path}{path and '.'}{name} was on the meta device, and {by} did not fill it: {found} of its "
                f"{tensor.numel()} elements were not written. Write all of them there; or build this module with its "
                "values, not on the meta device."
            )


def held(holder: Holder) -> nn.Parameter:
    module, name = holder
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def unwritten_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same layout on this device, filled with the pattern of elements that are not written yet."""
    made = torch.empty_like(tensor, device=device)
    _memory(made).fill_(_byte(made))
    return made


def unwritten(tensor: torch.Tensor) -> int:
    """How many elements of a tensor made by `unwritten_like` were never written.

    Integers may have any value, so for them it is all elements or none; for bool it is none.
    """
    floating = tensor.is_floating_point() or tensor.is_complex()
    memory = _memory(tensor) if tensor.device.type != "meta" else torch.empty(0)
    if tensor.dtype is torch.bool or not tensor.numel() or memory.numel() != tensor.numel() * tensor.itemsize:
        return 0
    size = min(tensor.itemsize, 8)
    words = memory.view(WORDS[size])
    pattern = torch.full((size,), _byte(tensor), dtype=torch.uint8).view(WORDS[size]).item()
    found = sum(int((part == pattern).sum()) for part in words.split(AT_ONCE)) * size // tensor.itemsize
    return found if floating or found == tensor.numel() else 0


def _byte(tensor: torch.Tensor) -> int:
    """The pattern's byte: a NaN that no operator gives for floats, and a number that nobody counts to for integers."""
    if tensor.dtype is torch.bool:
        return 0
    return 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xFD


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]
