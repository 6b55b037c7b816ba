"""What a graph is given and what it returns: memory that keeps its address, written before a launch, read after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

SMALL = 256  # bytes; results up to this are handed out with one copy
ALIGN = 16


class Held:
    """Memory that keeps its address, laid out as one tensor of the batch; each call's is copied in.

    What is copied is the stretch of memory that the tensor's elements lie in, so that any strides will do: gaps,
    transposed, or one element shown many times.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.plain = like.is_contiguous()
        self.extent = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True)) + 1
        self.extent = self.extent if like.numel() else 0
        memory = torch.empty(self.extent, dtype=like.dtype, device=like.device)
        self.tensor = memory.as_strided(like.shape, like.stride())
        self.target = self.tensor if self.plain else memory

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of the tensor is copied to ``target``."""
        return tensor if self.plain else tensor.as_strided((self.extent,), (1,))


class Results:
    """A graph's results, laid out inside of it so that copies of all the small ones cost one launch."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = list(results)
        self.places: dict[int, tuple[int, int]] = {}
        end = 0
        for index, value in enumerate(self.results):
            if isinstance(value, torch.Tensor) and value.nbytes <= SMALL:
                self.places[index] = end, value.nbytes
                end += -(-value.nbytes // ALIGN) * ALIGN
        self.packed: torch.Tensor | None = None
        if self.places:
            device = self.results[next(iter(self.places))].device
            self.packed = torch.empty(end, dtype=torch.uint8, device=device)
            for index, like in enumerate(self.results):
                if index in self.places:
                    self._view(self.packed, index, like).copy_(like)
                    self.results[index] = torch.empty_like(like, device="meta")  # the shape is all that is needed

    def copies(self) -> list[Any]:
        """Tensors that nobody else holds."""
        packed = self.packed.clone() if self.packed is not None else None
        found: list[Any] = []
        for index, value in enumerate(self.results):
            if index in self.places:
                assert packed is not None
                found.append(self._view(packed, index, value))
            else:
                found.append(pytree.tree_map_only(torch.Tensor, torch.clone, value))
        return found

    def _view(self, packed: torch.Tensor, index: int, like: torch.Tensor) -> torch.Tensor:
        start, size = self.places[index]
        return packed[start : start + size].view(like.dtype).view(like.shape)
