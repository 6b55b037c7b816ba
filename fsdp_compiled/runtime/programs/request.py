"""A call, as the programs that are kept are asked for it, and why one of them is not for it."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsdp_compiled.capture.captured import batch_tensors
from fsdp_compiled.capture.dynamic_shapes import Sizes, unfit
from fsdp_compiled.capture.global_modes import GlobalModes
from fsdp_compiled.runtime.param_step_counts import Names
from fsdp_compiled.runtime.programs.compile import Compiled, Kind, label_of

ONE_OF = ", one of "

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
    modes: GlobalModes  # the modes of the caller
    buffers: Mapping[str, torch.Tensor | None]  # of the model that are others now
    added: Names = frozenset()  # parameters that have gradients in the sums which a last microbatch ends
    rows: int = 0  # that count, where ranks are weighed by them
    sizes: Sizes = field(default_factory=dict)
    key: tuple[Any, ...] = ()
    compiled: Compiled | None = None
    changed: Sequence[Changed] = ()  # why the programs of this shape that there are will not do
    label: str = ""
    closed: Mapping[str, torch.Tensor] = field(default_factory=dict)  # that a program closes over, and are others now
    posted: bool = False  # whether the others know of the call
    instead: Request | None = None  # the same for these sizes alone, where no program can be made for several
    compared: bool = False  # whether its sizes, which the program leaves open, must be those of the other ranks

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Of the batch."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def but_sizes(self) -> tuple[Any, ...]:
        """All that the call has but the sizes of its tensors."""
        kind, described, *rest = self.key
        leaves = zip(self.leaves, described, strict=True)
        kinds = [(one.dtype, one.device, one.dim()) if isinstance(one, torch.Tensor) else said for one, said in leaves]
        return (kind, tuple(kinds), *rest)

    def said(self, label: str) -> str:
        """What the other ranks are told of a call of this program: ``step (float32[8, 6]), one of step (...)``."""
        return f"{label_of(self.kind, self.batch, self.named, {})}{ONE_OF}{label}" if self.compared else label

    def number(self, compiled: Compiled) -> int:
        """What ranks compare of a call of this program."""
        sizes = zlib.crc32(repr(sorted(self.sizes.items())).encode()) if self.compared else 0
        return compiled.number + sizes

    def give_up_sizes(self) -> None:
        """No program serves several: this is the request for these sizes alone."""
        assert self.instead is not None
        self.__dict__.update(vars(self.instead) | {"posted": self.posted})


def misfit(compiled: Compiled, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes) -> str | None:
    """Why this program is not for a batch of these sizes."""
    now = tuple(sizes.values())
    if now in compiled.fitting:
        return None
    reason = unfit(compiled.program, batch_tensors(batch, named))
    if reason is None:
        compiled.fitting.add(now)
    return reason


def differentiable(batch: Mapping[str, torch.Tensor]) -> str:
    name = next(name for name, tensor in batch.items() if tensor.requires_grad)
    return (
        f"batch{name} requires a gradient. A program gives gradients to the model's parameters alone, so what made "
        "this tensor would not be trained: make it part of the model or the loss; or pass tensor.detach(). A loss that "
        "differentiates by its inputs calls requires_grad_() itself."
    )


def full(limit: int, new: str, evicted: str, kept: Collection[str], count: int) -> str:
    """What is said when a program is dropped for another; the cures once."""
    text = f"compiling {new}: {limit} programs are kept (Policy.programs), so that of {evicted} was dropped"
    if count > 1:
        return f"{text} ({count} so far)"
    shapes = "".join(f"\n  {label}" for label in kept)
    return (
        f"{text}. Compiling takes seconds; a call with these shapes would compile again. Kept are{shapes}\n"
        "Give batches few shapes: drop the last short batch (drop_last=True), pad, or sort lengths into buckets; or "
        "raise Policy.programs."
    )
