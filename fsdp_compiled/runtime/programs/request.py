"""A request: one call, as the program cache looks it up, and why a cached program does not match it.

Also learns which sizes of the batch change between calls, from the programs that were made, under ``dynamic="auto"``.

    step (float32[8, 6])       program 1, for 8 rows
    step (float32[5, 6])       program 2, for every number of rows: they have changed
    step (float32[7, 6])       program 2
    step (float32[8, 6])       program 1, still, which knows its size
    step (float32[8, 9])       program 3, for every number of rows and columns

`torch.compile` does the same. All is learned from programs alone, and all ranks have the same programs, so they decide
alike.
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

# What the user called, for messages.
CALLS: dict[Kind, str] = {
    "step": "step", "last": "step", "accumulate": "accumulate", "gradient": "value_and_grad", "training": "forward",
    "forward": "sharded(...)",
}  # fmt: skip


class Changed(NamedTuple):
    """Why a program does not fit a call."""

    label: str  # a few words, the same on every rank where the same thing has changed
    reason: str
    quiet: bool = False  # whether users do this all the time


@dataclass
class Request:
    """A call, with all that finding its program needs, and the program if there is one."""

    kind: Kind
    batch: tuple[Any, ...]
    named: dict[str, Any]
    leaves: Sequence[Any]  # of the batch
    modes: GlobalModes  # the modes of the caller
    added: Names = frozenset()  # parameters with gradients in the sums that a last microbatch ends
    rows: int = 0  # the batch's rows, where ranks are weighed by them
    sizes: Sizes = field(default_factory=dict)
    key: tuple[Any, ...] = ()
    compiled: Compiled | None = None
    changed: Sequence[Changed] = ()  # why the kept programs of this shape do not fit
    label: str = ""
    closed: Mapping[str, torch.Tensor] = field(default_factory=dict)  # tensors a program closes over that were replaced
    posted: bool = False  # whether the other ranks know of the call
    instead: Request | None = None  # the request for these sizes alone, if no program fits several
    compared: bool = False  # whether its open sizes must be the same on all ranks

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def but_sizes(self) -> tuple[Any, ...]:
        """The key of the call without the sizes of its tensors."""
        kind, described, *rest = self.key
        leaves = zip(self.leaves, described, strict=True)
        kinds = [(one.dtype, one.device, one.dim()) if isinstance(one, torch.Tensor) else said for one, said in leaves]
        return (kind, tuple(kinds), *rest)

    def said(self, label: str) -> str:
        """What other ranks are told of this call: ``step (float32[8, 6]), one of step (...)``."""
        return f"{label_of(self.kind, self.batch, self.named, {})}{ONE_OF}{label}" if self.compared else label

    def number(self, compiled: Compiled) -> int:
        """The number that ranks compare at a call of this program."""
        sizes = zlib.crc32(repr(sorted(self.sizes.items())).encode()) if self.compared else 0
        return compiled.number + sizes

    def give_up_sizes(self) -> None:
        """Turns this into the request for these sizes alone, as no program serves several."""
        assert self.instead is not None
        self.__dict__.update(vars(self.instead) | {"posted": self.posted})


def mismatch(compiled: Compiled, request: Request) -> str | None:
    """The reason why this program does not fit a batch of these sizes."""
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
    """The message when a program is dropped for another. Advice is given only the first time."""
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
KEPT = 256  # kinds of calls that are remembered at most


@dataclass
class _Seen:
    """What is known of calls that differ in sizes alone."""

    last: list[torch.Tensor]  # the tensors of the last call that a program was made for, on meta
    moving: list[Dims] = field(default_factory=list)  # the open dims of each program that was made, the newest last
    fixed: bool = False  # whether no program can serve several sizes


class MovingSizes:
    """What is known of the sizes in one model's calls."""

    def __init__(self) -> None:
        self._seen: dict[Any, _Seen] = {}  # by `Request.but_sizes`

    def known(self, request: Request) -> Sequence[Dims]:
        """The open dims of the programs for calls like this one, the newest first."""
        return () if (seen := self._seen.get(request.but_sizes)) is None else seen.moving[::-1]

    def changed(self, request: Request) -> Dims:
        """The dims that a program for this call should leave open; none for a program of these sizes alone."""
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
        """Notes that a program was made for this call; ``several``: whether it was to fit several sizes."""
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
    """Whether the two calls look the same if these dims are left open."""
    sizes = [sizes_of(dims, tensors) for tensors in zip(*pairs, strict=True)]
    return all(len(one) == len(dims) for one in sizes) and all(
        layout(one, sizes[0])[:3] == layout(other, sizes[1])[:3] for one, other in pairs
    )
