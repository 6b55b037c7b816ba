"""A tensor's bytes, as files are written from and read into, without a copy."""

from __future__ import annotations

import ctypes

import torch


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, writable; they keep the tensor alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"no bytes of a tensor on {tensor.device} with strides {tensor.stride()}")
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")
