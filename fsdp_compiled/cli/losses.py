"""Losses that the host has not read yet, and which rank's was no number.

A step returns its loss on the device; reading it makes the host wait. So losses are kept until the journal wants one,
and then all that are kept are read in one transfer: the mean over the ranks, this rank's own, the gradient's norm. The
mean and the norm are the same on every rank, so that all see in the same step that one is not finite, and only then ask
each other whose it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Read:
    """One step's numbers, on the host."""

    step: int
    loss: float
    grad_norm: float
    own: tuple[float, ...]  # this rank's losses, one a microbatch

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Unread:
    """The numbers of steps whose losses were not read yet."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, list[Tensor]]] = []

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, own: Sequence[Tensor]) -> None:
        # A copy: under CUDA graphs the next step may write into what this one returned.
        self._steps.append((step, [tensor.detach().clone() for tensor in (loss, grad_norm, *own)]))

    def read(self) -> list[Read]:
        """Oldest first; the host waits for the device once."""
        if not self._steps:
            return []
        tensors = [tensor.double() for _, numbers in self._steps for tensor in numbers]
        values = iter(torch.stack(tensors).tolist())
        found = []
        for step, numbers in self._steps:
            loss, norm, *own = (next(values) for _ in numbers)
            found.append(Read(step, loss, norm, tuple(own)))
        self._steps.clear()
        return found


def blame(read: Read, exchange: Callable[[Any], list[Any]]) -> str:
    """What was not finite in this step, and on which ranks; every rank asks."""
    odd = exchange(next((own for own in read.own if not math.isfinite(own)), None))
    ranks = [f"rank {rank} ({value})" for rank, value in enumerate(odd) if value is not None]
    if ranks:
        return f"the loss is {read.loss} at step {read.step}: it is not finite on {_list(ranks)}"
    what = f"the gradient's norm is {read.grad_norm}" if math.isfinite(read.loss) else f"the loss is {read.loss}"
    return f"{what} at step {read.step}, though each rank's own loss is finite"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
