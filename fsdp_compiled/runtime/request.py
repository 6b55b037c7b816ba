"""A call, as the programs that are kept are asked for it, and why one of them is not for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp_compiled.capture.ambient import Ambient
from fsdp_compiled.capture.captured import batch_tensors
from fsdp_compiled.capture.dynamic_shapes import Sizes, unfit
from fsdp_compiled.runtime.compile import Compiled, Kind

# What a person called, for messages.
CALLS: dict[Kind, str] = {
    "step": "step", "last": "step", "accumulate": "accumulate", "gradient": "value_and_grad", "training": "forward",
    "forward": "sharded(...)",
}  # fmt: skip


class Changed(NamedTuple):
    """Why a program is not for a call."""

    label: str  # in few words that are the same on every rank where the same has changed
    reason: str
    quiet: bool = False  # whether it is what one does all the time


@dataclass
class Request:
    """A call, with what it takes to find its program, and the program if there is one."""

    kind: Kind
    batch: tuple[Any, ...]
    named: dict[str, Any]
    leaves: Sequence[Any]  # of the batch
    sizes: Sizes
    rows: int  # that count, where ranks are weighed by them
    ambient: Ambient  # the modes of the caller
    key: tuple[Any, ...]
    compiled: Compiled | None
    changed: Sequence[Changed]  # why the programs of this shape that there are will not do
    label: str
    closed: Mapping[str, torch.Tensor]  # tensors that the program closes over and that are others now
    buffers: Mapping[str, torch.Tensor | None]  # of the model that are others now
    posted: bool = False  # whether the others know of the call


def misfit(compiled: Compiled, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes) -> str | None:
    """Why this program is not for a batch of these sizes."""
    now = tuple(sizes.values())
    if now in compiled.fitting:
        return None
    reason = unfit(compiled.program, batch_tensors(batch, named))
    if reason is None:
        compiled.fitting.add(now)
    return reason
