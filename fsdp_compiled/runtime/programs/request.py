"""A request: one call as the program cache looks it up, and why a cached program does not match it.

Which sizes of the batch change between calls: learned from the programs that were made, under ``dynamic="auto"``.

    step (float32[8, 6])       program 1, for 8 rows
    step (float32[5, 6])       program 2, for every number of rows: they have changed
    step (float32[7, 6])       program 2
    step (float32[8, 6])       program 1, still, which knows its size
    step (float32[8, 9])       program 3, for every number of rows and columns

As `torch.compile` does it. What is learned comes from programs alone, and ranks have the same, so that all of them
decide alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsdp_compiled.capture.captured import batch_tensors
from fsdp_compiled.capture.dynamic_shapes import Sizes, layout, sizes_of, stay_open, unfit
from fsdp_compiled.capture.global_modes import GlobalModes
from fsdp_compiled.ir.program import Program
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


def mismatch(compiled: Compiled, request: Request) -> str | None:
    """Why this program is not for a batch of these sizes."""
    now = tuple(request.sizes.values())
    if now in compiled.fitting:
        return None
    reason = unfit(compiled.program, batch_tensors(request.batch, request.named))
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


Dims = tuple[int, ...]
KEPT = 256  # kinds of calls that are remembered


@dataclass
class _Seen:
    """Of calls that differ in sizes alone."""

    last: list[torch.Tensor]  # the tensors of the last one that a program was made for, without memory
    moving: list[Dims] = field(default_factory=list)  # the dims that programs were made for, the newest last
    fixed: bool = False  # whether no program can serve several sizes


class MovingSizes:
    """What is known of the sizes of one model's calls."""

    def __init__(self) -> None:
        self._seen: dict[Any, _Seen] = {}  # by all that calls have but their sizes

    def known(self, request: Request) -> Sequence[Dims]:
        """The dims that there are programs for, of calls like this one, the newest first."""
        return () if (seen := self._seen.get(request.but_sizes)) is None else seen.moving[::-1]

    def changed(self, request: Request) -> Dims:
        """The dims that a program for this call should leave open; none: it is for these sizes."""
        seen = self._seen.get(request.but_sizes)
        if seen is None or seen.fixed:
            return ()
        pairs = list(zip(seen.last, request.tensors, strict=True))
        different = {dim for one, other in pairs for dim in range(one.dim()) if one.shape[dim] != other.shape[dim]}
        for dims in dict.fromkeys(tuple(sorted(different.union(known))) for known in (*seen.moving[::-1], ())):
            if dims and _alike(pairs, dims):
                return dims
        return ()

    def made(self, request: Request, program: Program, several: bool) -> None:
        """A program was made for this call; ``several``: one for several sizes was asked for."""
        dims = tuple(request.sizes)
        given = batch_tensors(request.batch, request.named)
        fixed = several and not (dims and stay_open(program, given, request.sizes))
        last = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in request.tensors]
        seen = self._seen.pop(request.but_sizes, None) or _Seen(last)
        self._seen[request.but_sizes] = seen
        seen.last, seen.fixed = last, seen.fixed or fixed
        if dims and dims not in seen.moving:
            seen.moving.append(dims)
        if len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]


def _alike(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], dims: Dims) -> bool:
    """Whether the two calls are one where these dims move."""
    sizes = [sizes_of(dims, tensors) for tensors in zip(*pairs, strict=True)]
    return all(len(one) == len(dims) for one in sizes) and all(
        layout(one, sizes[0])[:3] == layout(other, sizes[1])[:3] for one, other in pairs
    )
