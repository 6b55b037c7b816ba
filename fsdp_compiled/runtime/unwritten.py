"""Finds memory that nothing wrote: new tensors are filled with a pattern that no initialization gives."""

from __future__ import annotations

import torch

AT_ONCE = 1 << 20  # elements that are compared at a time, so that comparing takes little memory
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unwritten_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One of the same layout on this device, of which nothing is written yet."""
    made = torch.empty_like(tensor, device=device)
    _memory(made).fill_(_byte(made))
    return made


def unwritten(tensor: torch.Tensor) -> int:
    """How many elements of what `unwritten_like` made nobody has written.

    Of integers, which may be anything, that is all of them or none; of bool, none.
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
    """Of floating-point numbers, a NaN that no operator gives; of integers, a number that nobody counts to."""
    if tensor.dtype is torch.bool:
        return 0
    return 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xFD


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]
